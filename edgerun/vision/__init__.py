"""Vision models: the dynamic batcher and the ONNX Runtime runner."""
