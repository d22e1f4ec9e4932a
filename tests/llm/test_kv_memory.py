"""Handing back the pages of a cache that nothing was written to: with the real llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgerun.llm.kv_memory import KvRegion, large_mappings
from edgerun.llm.llama_api import ContextSettings, LlamaContext, LlamaLibrary, LlamaModel

pytestmark = pytest.mark.native

_CELLS = 8 * 16384  # 64 MB for the tiny model


@pytest.fixture(scope="module")
def model(llama_lib_dir: Path, tiny_gguf: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(LlamaLibrary(llama_lib_dir), str(tiny_gguf), use_gpu=False)
    yield model
    model.close()


def open_context(model: LlamaModel, *, unified: bool, flash_attention: bool) -> LlamaContext:
    return LlamaContext(
        model, ContextSettings(_CELLS, 64, 8, 1, unified=unified, flash_attention=flash_attention)
    )


def all_logits(context: LlamaContext) -> list[bytes]:
    """Prompts and single tokens in several sequences, cut and gone on."""
    found = []
    steps = [(s, [3 + (s + i) % 200 for i in range(64)], 64 * n) for n in range(3) for s in range(8)]
    steps += [(s, [9], 192) for s in range(8)]
    for seq_id, tokens, start in steps:
        context.batch.clear()
        last = context.batch.add(seq_id, tokens, start, wants_logits=True)
        context.decode()
        found.append(context.logits(last).tobytes())
    return found


@pytest.mark.parametrize(("unified", "flash_attention"), [(False, False), (True, True), (False, True)])
def test_outputs_are_the_same_bit_for_bit(model: LlamaModel, unified: bool, flash_attention: bool) -> None:
    kept = open_context(model, unified=unified, flash_attention=flash_attention)
    expected = all_logits(kept)
    kept.close()
    before = large_mappings()
    context = open_context(model, unified=unified, flash_attention=flash_attention)
    size = _CELLS * model.kv_bytes_per_token("f16")
    region = KvRegion.find(before, size)
    assert region is not None
    assert region.resident_bytes() > 0.99 * size
    region.hand_back()
    assert region.resident_bytes() == 0
    assert all_logits(context) == expected
    assert 0 < region.resident_bytes() < 0.5 * size
    context.close()


def test_what_is_not_certain_is_left_alone(model: LlamaModel) -> None:
    before = large_mappings()
    context = open_context(model, unified=True, flash_attention=True)
    size = _CELLS * model.kv_bytes_per_token("f16")
    assert KvRegion.find(before, size // 2) is None  # no block of that size
    assert KvRegion.find(large_mappings(), size) is None  # nothing is new
    assert KvRegion.find(before, 1000) is None  # too small to be sure, or to matter
    all_logits(context)
    assert KvRegion.find(before, size) is None  # written to
    context.close()


def test_a_block_of_the_right_size_with_something_in_it_is_not_taken() -> None:
    before = large_mappings()
    array = np.ones(64 << 20, dtype=np.uint8)
    assert KvRegion.find(before, array.nbytes) is None
    assert array.all()
