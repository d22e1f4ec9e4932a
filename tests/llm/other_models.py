"""GGUF files of a few kilobytes with random weights: what must be refused, and other kinds of memory."""

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


def write_sliding_window(path: Path, *, window: int = 32) -> None:
    """A Gemma 3 of two layers: the first sees the last `window` tokens only, the second all."""
    numbers = {
        "gemma3.block_count": 2,
        "gemma3.context_length": _CONTEXT,
        "gemma3.embedding_length": _EMBD,
        "gemma3.feed_forward_length": _FF,
        "gemma3.attention.head_count": 2,
        "gemma3.attention.head_count_kv": 2,
        "gemma3.attention.key_length": _EMBD // 2,
        "gemma3.attention.value_length": _EMBD // 2,
        "gemma3.attention.sliding_window": window,
        "gemma3.attention.sliding_window_pattern": 2,
    }
    shapes: _Shapes = {"token_embd.weight": (_EMBD, tiny.NUM_VOCAB), "output_norm.weight": (_EMBD,)}
    for layer in ("blk.0", "blk.1"):
        shapes |= {f"{layer}.attn_{part}.weight": (_EMBD, _EMBD) for part in ("q", "k", "v", "output")}
        shapes |= {f"{layer}.{norm}.weight": (_EMBD,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {f"{layer}.post_{part}_norm.weight": (_EMBD,) for part in ("attention", "ffw")}
        shapes |= {f"{layer}.attn_{part}_norm.weight": (_EMBD // 2,) for part in ("q", "k")}
        shapes |= {f"{layer}.ffn_{part}.weight": (_EMBD, _FF) for part in ("gate", "up")}
        shapes[f"{layer}.ffn_down.weight"] = (_FF, _EMBD)
    _write_random(path, "gemma3", numbers, shapes)


def write_recurrent(path: Path) -> None:
    """A Mamba of two layers: a state of fixed size for each sequence, and no attention."""
    inner, state, rank, kernel = 2 * _EMBD, 16, 4, 4
    numbers = {
        "mamba.block_count": 2,
        "mamba.context_length": _CONTEXT,
        "mamba.embedding_length": _EMBD,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": kernel,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
    }
    shapes: _Shapes = {"token_embd.weight": (_EMBD, tiny.NUM_VOCAB), "output_norm.weight": (_EMBD,)}
    for layer in ("blk.0", "blk.1"):
        shapes |= {
            f"{layer}.attn_norm.weight": (_EMBD,),
            f"{layer}.ssm_in.weight": (_EMBD, 2 * inner),
            f"{layer}.ssm_conv1d.weight": (kernel, inner),
            f"{layer}.ssm_conv1d.bias": (inner,),
            f"{layer}.ssm_x.weight": (inner, rank + 2 * state),
            f"{layer}.ssm_dt.weight": (rank, inner),
            f"{layer}.ssm_dt.bias": (inner,),
            f"{layer}.ssm_a": (state, inner),
            f"{layer}.ssm_d": (inner,),
            f"{layer}.ssm_out.weight": (inner, _EMBD),
        }
    _write_random(path, "mamba", numbers, shapes)


def _write_random(path: Path, architecture: str, numbers: dict[str, int], shapes: _Shapes) -> None:
    """The tiny model's words, another network. Norms are ones; Mamba's decay rates must be negative."""
    rng = np.random.default_rng(0)

    def values(name: str, shape: tuple[int, ...]) -> bytes:
        if name.endswith("norm.weight"):
            return np.ones(shape, dtype=np.float32).tobytes()
        random = rng.normal(0, 0.3, shape).astype(np.float32)
        return (-np.abs(random) if name.endswith("ssm_a") else random).tobytes()

    words = [entry for entry in tiny._metadata() if b"llama." not in entry and b"general." not in entry]
    epsilon = f"{architecture}.attention.layer_norm_rms_epsilon"
    metadata = [
        tiny._key("general.architecture", tiny._STRING, tiny._string(architecture)),
        tiny._key(epsilon, tiny._FLOAT32, struct.pack("<f", 1e-5)),
        *(tiny._uint(name, value) for name, value in numbers.items()),
        *words,
    ]
    tensors = [(name, shape, tiny._F32, values(name, shape)) for name, shape in shapes.items()]
    tiny._write(path, metadata, tensors)
