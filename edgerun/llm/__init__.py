"""The language model: requests, scheduler, KV blocks, and the one home of llama.cpp."""
