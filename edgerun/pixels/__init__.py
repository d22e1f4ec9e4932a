"""Pictures: bytes to a model's input array and scores to labels. Knows no model runtime."""
