"""Words: chat templates, prompts and token pieces back to text. No native code."""
