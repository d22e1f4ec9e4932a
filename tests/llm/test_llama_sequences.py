"""Sharing, cutting, saving and putting back, with the real llama.cpp: logits must not change by one bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgerun.llm.llama_api import (
    DECODE_NO_ROOM,
    DECODE_OK,
    ContextSettings,
    LlamaContext,
    LlamaLibrary,
    LlamaModel,
    MemoryKind,
)
from edgerun.llm.tiny_model import write_tiny_model

from .other_models import write_recurrent, write_sliding_window

pytestmark = pytest.mark.native

_SPARE = 5
_CHUNK = 64
_PROMPT = [3 + (7 * i) % 250 for i in range(128)]
_WRITERS: dict[MemoryKind, Callable[[Path], None]] = {
    "plain": write_tiny_model,
    "window": write_sliding_window,
    "recurrent": write_recurrent,
}


@pytest.fixture(scope="module")
def library(llama_lib_dir: Path) -> LlamaLibrary:
    return LlamaLibrary(llama_lib_dir)


@pytest.fixture(scope="module")
def models(
    library: LlamaLibrary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, LlamaModel]]:
    folder = tmp_path_factory.mktemp("kinds")
    found: dict[str, LlamaModel] = {}
    for kind, write in _WRITERS.items():
        write(folder / f"{kind}.gguf")
        found[kind] = LlamaModel(library, str(folder / f"{kind}.gguf"), use_gpu=False)
    yield found
    for model in found.values():
        model.close()


Open = Callable[..., LlamaContext]


@pytest.fixture
def open_context(models: dict[str, LlamaModel]) -> Iterator[Open]:
    """open_context(kind, unified=, flash_attention=, cells=): six ids, the last one spare."""
    opened: list[LlamaContext] = []

    def open_(
        kind: str, *, unified: bool, flash_attention: bool = False, cells: int = 6 * 256
    ) -> LlamaContext:
        settings = ContextSettings(
            cells, _CHUNK, num_seq_ids=6, num_threads=1, unified=unified, flash_attention=flash_attention
        )
        opened.append(LlamaContext(models[kind], settings))
        return opened[-1]

    yield open_
    for context in opened:
        context.close()


def decode(context: LlamaContext, seq_id: int, tokens: list[int], start: int = 0) -> NDArray[np.float32]:
    """The logits after the last of them, computed in fixed chunks."""
    logits = np.empty(0, dtype=np.float32)
    for first in range(0, len(tokens), _CHUNK):
        chunk = tokens[first : first + _CHUNK]
        context.batch.clear()
        last = context.batch.add(seq_id, chunk, start + first, wants_logits=True)
        assert context.decode() == DECODE_OK
        logits = context.logits(last).copy()
    return logits


LAYOUTS = pytest.mark.parametrize(
    ("unified", "flash_attention"), [(True, True), (False, False), (False, True)], ids=["u+fa", "s", "s+fa"]
)


@pytest.mark.parametrize("kind", _WRITERS)
def test_the_kind_of_memory_is_told(models: dict[str, LlamaModel], kind: str) -> None:
    assert models[kind].memory_kind() == kind


@LAYOUTS
@pytest.mark.parametrize("kind", ["plain", "window"])
def test_a_copied_prefix_gives_the_same_logits(
    open_context: Open, kind: str, unified: bool, flash_attention: bool
) -> None:
    if kind == "window" and not unified:
        pytest.skip("a window is saved without its beginning: see the test below")
    tail = [9, 8, 7, 6]
    alone = open_context(kind, unified=unified, flash_attention=flash_attention)
    decode(alone, 0, _PROMPT[:64])
    expected = [decode(alone, 0, tail, 64), decode(alone, 0, [5], 68)]
    context = open_context(kind, unified=unified, flash_attention=flash_attention)
    decode(context, 0, _PROMPT)  # longer than what is shared
    for target in (1, 2):  # the second copy reuses what the first one read
        context.copy_sequence(0, target, 64)
        assert context.position_range(target) == (0, 63)
    assert context.position_range(0) == (0, 127)
    for target in (1, 2):
        if not unified:  # in a pool the cells lie elsewhere, and sums of floats depend on their order
            assert np.array_equal(decode(context, target, tail, 64), expected[0])
            assert np.array_equal(decode(context, target, [5], 68), expected[1])
        else:
            assert np.allclose(decode(context, target, tail, 64), expected[0], atol=1e-3)


@pytest.mark.parametrize("kind", _WRITERS)
@LAYOUTS
def test_saved_and_loaded_goes_on_as_if_nothing_had_happened(
    open_context: Open, kind: str, unified: bool, flash_attention: bool
) -> None:
    context = open_context(kind, unified=unified, flash_attention=flash_attention)
    decode(context, 0, _PROMPT)
    saved = context.save_sequence(0)
    expected = decode(context, 0, [9], 128)
    assert context.remove_sequence(0)
    assert context.position_range(0) == (-1, -1)
    assert context.load_sequence(0, saved)
    assert np.array_equal(decode(context, 0, [9], 128), expected)
    assert context.load_sequence(3, saved)  # and as another sequence
    logits = decode(context, 3, [9], 128)
    assert np.array_equal(logits, expected) if not unified else np.allclose(logits, expected, atol=1e-3)


def test_a_tail_is_saved_without_the_shared_prefix(open_context: Open) -> None:
    context = open_context("plain", unified=True, flash_attention=True)
    decode(context, 0, _PROMPT[:64])
    context.copy_sequence(0, 1, 64)
    decode(context, 1, _PROMPT[64:], 64)
    whole, tail = context.save_sequence(1), context.save_tail(1, 64, _SPARE)
    assert len(tail) < 0.6 * len(whole)
    assert context.position_range(_SPARE) == (-1, -1)
    expected = decode(context, 1, [9], 128)
    context.remove_sequence(1)
    context.copy_sequence(0, 1, 64)
    assert context.load_tail(1, tail, _SPARE)
    assert context.position_range(1) == (0, 127)
    assert context.position_range(0) == (0, 63)
    assert context.position_range(_SPARE) == (-1, -1)
    assert np.array_equal(decode(context, 1, [9], 128), expected)


@pytest.mark.parametrize("kind", _WRITERS)
def test_in_streams_a_tail_is_the_whole(open_context: Open, kind: str) -> None:
    context = open_context(kind, unified=False)
    decode(context, 1, _PROMPT)
    saved = context.save_tail(1, 64, _SPARE)
    expected = decode(context, 1, [9], 128)
    context.remove_sequence(1)
    assert context.load_tail(1, saved, _SPARE)
    assert np.array_equal(decode(context, 1, [9], 128), expected)


@pytest.mark.parametrize("kind", _WRITERS)
def test_exchanged_streams_go_on_under_the_other_id(open_context: Open, kind: str) -> None:
    context = open_context(kind, unified=False)
    other = [11, 12, 13, 14, 15]
    decode(context, 0, _PROMPT)
    decode(context, 2, other)
    context.exchange_sequences(0, 2)
    logits = [decode(context, 2, [9], 128), decode(context, 0, [9], 5)]
    alone = open_context(kind, unified=False)
    decode(alone, 0, _PROMPT)
    decode(alone, 1, other)
    assert np.array_equal(logits[0], decode(alone, 0, [9], 128))
    assert np.array_equal(logits[1], decode(alone, 1, [9], 5))


def test_a_window_is_saved_without_its_beginning_and_that_shows(open_context: Open) -> None:
    context = open_context("window", unified=False)
    decode(context, 0, _PROMPT)
    context.copy_sequence(0, 1, 128)
    assert context.position_range(1) == (96, 127)  # a window of 32
    context.copy_sequence(0, 2, 64)
    assert context.position_range(2) == (-1, -1)


def test_a_window_whose_cells_another_took_shows_it(open_context: Open) -> None:
    """llama.cpp gives cells that no later token of their sequence can see to whoever comes by."""
    context = open_context("window", unified=True, flash_attention=True, cells=256)
    for seq_id in range(4):
        decode(context, seq_id, _PROMPT[:64])
    context.remove_sequence(1)
    decode(context, 4, _PROMPT[:32])
    context.remove_sequence(3)
    assert context.position_range(2) == (0, 63)
    decode(context, 5, _PROMPT[:64])
    assert context.position_range(2) == (32, 63)


def test_an_empty_stream_can_be_exchanged(open_context: Open) -> None:
    context = open_context("plain", unified=False)
    decode(context, 3, _PROMPT)
    context.exchange_sequences(0, 3)
    assert context.position_range(0) == (0, 127)
    assert context.position_range(3) == (-1, -1)


def test_a_copy_is_of_what_the_source_holds_now(open_context: Open) -> None:
    """What was read for one copy must not be used once the source has changed."""
    context = open_context("plain", unified=False)
    decode(context, 0, _PROMPT)
    context.copy_sequence(0, 1, 64)
    other = [200 - i for i in range(64)]
    context.remove_sequence(0)
    decode(context, 0, other)
    context.copy_sequence(0, 2, 64)
    expected = decode(context, 0, [9], 64)
    assert np.array_equal(decode(context, 2, [9], 64), expected)
    saved = context.save_sequence(1)
    context.copy_sequence(0, 3, 64)
    context.load_sequence(0, saved)
    context.copy_sequence(0, 4, 64)
    assert np.array_equal(decode(context, 4, [9], 64), decode(context, 1, [9], 64))


@LAYOUTS
def test_a_plain_memory_is_cut_where_asked(open_context: Open, unified: bool, flash_attention: bool) -> None:
    context = open_context("plain", unified=unified, flash_attention=flash_attention)
    decode(context, 0, _PROMPT)
    assert context.remove_sequence(0, 50)
    assert context.position_range(0) == (0, 49)


def test_a_recurrent_memory_cannot_be_cut(open_context: Open) -> None:
    context = open_context("recurrent", unified=True)
    decode(context, 0, _PROMPT)
    assert not context.remove_sequence(0, 64)
    assert context.position_range(0)[1] == 127
    assert context.remove_sequence(0)
    assert context.position_range(0) == (-1, -1)


@pytest.mark.parametrize("kind", ["plain", "window"])
def test_a_tail_that_does_not_fit_is_told_and_leaves_the_rest(open_context: Open, kind: str) -> None:
    context = open_context(kind, unified=True, flash_attention=True, cells=256)
    decode(context, 0, _PROMPT[:64])
    context.copy_sequence(0, 1, 64)
    decode(context, 1, _PROMPT[64:], 64)
    tail = context.save_tail(1, 64, _SPARE)
    context.remove_sequence(1, 64)
    decode(context, 2, _PROMPT)
    decode(context, 3, _PROMPT[:32])
    context.batch.clear()
    context.batch.add(4, _PROMPT[:64], 0, wants_logits=False)
    assert context.decode() == DECODE_NO_ROOM
    assert not context.load_tail(1, tail, _SPARE)
    assert context.position_range(_SPARE) == (-1, -1)
    assert context.position_range(1) == (0, 63)
    assert not context.load_sequence(4, tail)
    assert context.position_range(4) == (-1, -1)


@pytest.mark.parametrize("unified", [True, False])
def test_what_would_end_the_process_is_refused(open_context: Open, unified: bool) -> None:
    context = open_context("plain", unified=unified, flash_attention=True)
    saved = context.save_sequence(0)
    calls: tuple[Callable[[int], object], ...] = (
        context.position_range,
        context.remove_sequence,
        lambda bad: context.copy_sequence(0, bad, 1),
        lambda bad: context.copy_sequence(bad, 0, 1),
        context.save_sequence,
        lambda bad: context.load_sequence(bad, saved),
        lambda bad: context.save_tail(bad, 1, 0),
        lambda bad: context.load_tail(bad, saved, 0),
    )
    for bad in (-1, 6, 256, 1000):
        for call in calls:
            with pytest.raises(ValueError, match=r"is not in 0 \.\. 5"):
                call(bad)
    with pytest.raises(ValueError, match="to itself"):
        context.copy_sequence(1, 1, 1)


def test_a_pool_has_nothing_to_exchange(open_context: Open) -> None:
    with pytest.raises(ValueError, match="streams only"):
        open_context("plain", unified=True).exchange_sequences(0, 1)


def test_the_number_of_threads_changes_while_it_is_open(open_context: Open) -> None:
    context = open_context("plain", unified=False)
    expected = decode(context, 0, _PROMPT)
    context.set_num_threads(2)
    assert np.array_equal(decode(context, 1, _PROMPT), expected)
