"""edgerun: one app that runs a GGUF language model and ONNX vision models together on one device."""

__version__ = "0.1.0"
