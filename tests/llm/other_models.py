"""GGUF files that are no chat models, of a few kilobytes with random weights: what the loader must refuse."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from edgerun.llm import tiny_model as tiny

_EMBD, _FF, _CONTEXT = 64, 128, 512
_Shapes = dict[str, tuple[int, ...]]


def write_without_vocabulary(path: Path) -> None:
    """The tiny language model, but its tokens have no words."""
    metadata = [entry for entry in tiny._metadata() if b"tokenizer." not in entry]
    metadata.append(tiny._key("tokenizer.ggml.model", tiny._STRING, tiny._string("no_vocab")))
    tiny._write(path, metadata, tiny._tensors(np.random.default_rng(0)))


def write_bert(path: Path) -> None:
    """An embedding model: llama.cpp loads it and gives it a context, but it continues nothing."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"\u2581{c}" for c in "abcdefgh")]
    shapes = _bert_shapes(len(tokens))
    rng = np.random.default_rng(0)
    tensors: list[tiny._Tensor] = [
        (name, shape, tiny._F32, rng.normal(0, 0.1, shape).astype(np.float32).tobytes())
        for name, shape in shapes.items()
    ]
    tiny._write(path, _bert_metadata(tokens), tensors)


def _bert_metadata(tokens: list[str]) -> list[bytes]:
    types = [tiny._CONTROL if i < 5 else tiny._NORMAL for i in range(len(tokens))]
    numbers = {
        "bert.block_count": 1,
        "bert.context_length": _CONTEXT,
        "bert.embedding_length": _EMBD,
        "bert.feed_forward_length": _FF,
        "bert.attention.head_count": 2,
        "bert.pooling_type": 1,
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,  # as the format spells it
        "tokenizer.ggml.mask_token_id": 4,
    }
    return [
        tiny._key("general.architecture", tiny._STRING, tiny._string("bert")),
        tiny._key("bert.attention.layer_norm_epsilon", tiny._FLOAT32, struct.pack("<f", 1e-5)),
        tiny._key("bert.attention.causal", tiny._BOOL, b"\0"),
        tiny._key("tokenizer.ggml.model", tiny._STRING, tiny._string("bert")),
        tiny._list("tokenizer.ggml.tokens", tiny._STRING, [tiny._string(token) for token in tokens]),
        tiny._list("tokenizer.ggml.token_type", tiny._INT32, [struct.pack("<i", kind) for kind in types]),
        *(tiny._uint(name, value) for name, value in numbers.items()),
    ]


def _bert_shapes(num_tokens: int) -> _Shapes:
    """Row length first, as GGUF has it."""
    shapes: _Shapes = {
        "token_embd.weight": (_EMBD, num_tokens),
        "token_types.weight": (_EMBD, 2),
        "position_embd.weight": (_EMBD, _CONTEXT),
        "blk.0.ffn_up.weight": (_EMBD, _FF),
        "blk.0.ffn_up.bias": (_FF,),
        "blk.0.ffn_down.weight": (_FF, _EMBD),
        "blk.0.ffn_down.bias": (_EMBD,),
    }
    for part in ("q", "k", "v", "output"):
        shapes[f"blk.0.attn_{part}.weight"], shapes[f"blk.0.attn_{part}.bias"] = (_EMBD, _EMBD), (_EMBD,)
    for norm in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (_EMBD,)
    return shapes
