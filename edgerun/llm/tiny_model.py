"""A language model of a few kilobytes with random weights, written as a GGUF file.

It says nothing sensible; it proves that a native build computes (selftest.py), and it lets tests run
the real llama.cpp without any download. Its vocabulary is the 256 bytes, SentencePiece's
space and three control tokens, so it takes any text.
Format: the GGUF specification, version 3 (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_VOCAB = 3 + 256 + 1
BOS, EOS = 1, 2
_EMBD, _HEADS, _LAYERS, _FF, _CONTEXT = 64, 2, 2, 128, 512
_ALIGNMENT = 32  # GGUF's default
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _INT32 = 4, 6, 7, 8, 9, 5  # gguf_metadata_value_type
_F32, _Q4_1 = 0, 3  # ggml_type
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # llama_token_type
# ChatML-like, so that the chat route can be exercised; it writes no control tokens.
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_tiny_model(path: Path, *, seed: int = 0) -> None:
    """Write the model (about 150 kB). The same seed gives the same bytes."""
    _write(path, _metadata(), _tensors(np.random.default_rng(seed)))


def _write(path: Path, metadata: list[bytes], tensors: list[_Tensor]) -> None:
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)) + b"".join(metadata)
    infos, blobs, offset = [], [], 0
    for name, shape, kind, data in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos.append(_string(name) + dims + struct.pack("<IQ", kind, offset))
        padded = data + b"\0" * (-len(data) % _ALIGNMENT)
        blobs.append(padded)
        offset += len(padded)
    head = header + b"".join(infos)
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + b"".join(blobs))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", kind) + value


def _uint(name: str, value: int) -> bytes:
    return _key(name, _UINT32, struct.pack("<I", value))


def _list(name: str, kind: int, items: list[bytes]) -> bytes:
    return _key(name, _ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(items))


def _metadata() -> list[bytes]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, _NORMAL]
    return [
        _key("general.architecture", _STRING, _string("llama")),
        _key("general.name", _STRING, _string("edgerun tiny random model")),
        _uint("general.file_type", 3),  # mostly Q4_1
        _uint("llama.block_count", _LAYERS),
        _uint("llama.context_length", _CONTEXT),
        _uint("llama.embedding_length", _EMBD),
        _uint("llama.feed_forward_length", _FF),
        _uint("llama.attention.head_count", _HEADS),
        _uint("llama.attention.head_count_kv", _HEADS),
        _uint("llama.rope.dimension_count", _EMBD // _HEADS),
        _uint("llama.vocab_size", NUM_VOCAB),
        _key("llama.attention.layer_norm_rms_epsilon", _FLOAT32, struct.pack("<f", 1e-5)),
        _key("tokenizer.ggml.model", _STRING, _string("llama")),
        _list("tokenizer.ggml.tokens", _STRING, [_string(token) for token in tokens]),
        _list("tokenizer.ggml.scores", _FLOAT32, [struct.pack("<f", 0.0)] * NUM_VOCAB),
        _list("tokenizer.ggml.token_type", _INT32, [struct.pack("<i", kind) for kind in types]),
        _uint("tokenizer.ggml.bos_token_id", BOS),
        _uint("tokenizer.ggml.eos_token_id", EOS),
        _key("tokenizer.ggml.add_bos_token", _BOOL, b"\1"),
        _key("tokenizer.ggml.add_space_prefix", _BOOL, b"\0"),
        _key("tokenizer.chat_template", _STRING, _string(CHAT_TEMPLATE)),
    ]


_Tensor = tuple[str, tuple[int, ...], int, bytes]  # name, shape with the row length first, type, data


def _tensors(rng: np.random.Generator) -> list[_Tensor]:
    def weight(name: str, columns: int, rows: int) -> _Tensor:
        values = rng.normal(0, 0.3, (rows, columns)).astype(np.float32)
        return f"{name}.weight", (columns, rows), _Q4_1, _q4_1(values)

    def norm(name: str) -> _Tensor:
        return f"{name}.weight", (_EMBD,), _F32, np.ones(_EMBD, dtype=np.float32).tobytes()

    tensors = [
        weight("token_embd", _EMBD, NUM_VOCAB),
        norm("output_norm"),
        weight("output", _EMBD, NUM_VOCAB),
    ]
    for i in range(_LAYERS):
        block = f"blk.{i}"
        tensors += [norm(f"{block}.attn_norm"), norm(f"{block}.ffn_norm")]
        tensors += [weight(f"{block}.attn_{part}", _EMBD, _EMBD) for part in ("q", "k", "v", "output")]
        tensors += [weight(f"{block}.ffn_{part}", _EMBD, _FF) for part in ("gate", "up")]
        tensors.append(weight(f"{block}.ffn_down", _FF, _EMBD))
    return tensors


def _q4_1(values: NDArray[np.float32]) -> bytes:
    """Blocks of 32: a float16 scale and minimum, and 16 bytes of nibbles (ggml's block_q4_1)."""
    blocks = values.reshape(-1, 32)
    low = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - low) / 15
    levels = np.rint((blocks - low) / scale).astype(np.uint8)
    # byte i holds value i in its low nibble and value i + 16 in its high one
    nibbles = levels[:, :16] | levels[:, 16:] << 4
    parts = [scale.astype(np.float16).view(np.uint8), low.astype(np.float16).view(np.uint8), nibbles]
    return np.concatenate(parts, axis=1).tobytes()
