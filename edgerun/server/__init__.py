"""HTTP in front of the engine: the OpenAI-compatible socket."""
