"""What the cache keeps, shares and gives up, and the operations that it notes."""

from __future__ import annotations

from typing import Literal

import pytest

from edgerun.llm.chunks import ChunkRule
from edgerun.llm.kv_cache import KvCache, KvCacheConfig
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import Copy, Exchange, KvOperation, Remove, SwapIn, SwapOut

from .fakes import make_request

RULE = ChunkRule.of(flash_attention=False)


class Rig:
    """A cache, and sequences that are run through it without a scheduler."""

    def __init__(self, layout: Literal["unified", "streams"] = "unified", **config: int | bool) -> None:
        settings: dict[str, int | bool] = {"num_blocks": 32, "num_seq_ids": 4, **config}
        self.kv = KvCache(KvCacheConfig(layout, rule=RULE, **settings))  # type: ignore[arg-type]
        self.next_id = 0

    def admit(self, prompt: list[int], max_tokens: int = 100) -> Sequence:
        self.next_id += 1
        sequence = Sequence.of(make_request(self.next_id, prompt, max_tokens))
        lookup = self.kv.lookup(sequence)
        assert self.kv.can_admit(lookup, len(prompt), 0)
        self.kv.admit(sequence, lookup)
        assert self.kv.grow(sequence, len(prompt))
        return sequence

    def run(self, prompt: list[int], max_tokens: int = 100) -> Sequence:
        sequence = self.admit(prompt, max_tokens)
        self.kv.computed(sequence, len(prompt))
        return sequence

    def operations(self) -> tuple[KvOperation, ...]:
        return self.kv.take_operations()


def test_a_new_sequence_shares_what_a_running_one_holds() -> None:
    rig = Rig()
    first = rig.run([1] * 40)
    second = rig.admit([1] * 32 + [2] * 8)
    assert second.num_cached == 32
    assert first.slot is not None and second.slot is not None
    assert rig.operations() == (Copy(first.slot.seq_id, second.slot.seq_id, 32),)
    assert first.slot.block_table[:2] == second.slot.block_table[:2]
    rig.kv.check_integrity([first, second])


def test_streams_copy_to_the_token() -> None:
    rig = Rig("streams", num_blocks=64)
    first = rig.run([1] * 40)
    second = rig.admit([1] * 37 + [2] * 8)
    assert second.num_cached == 37
    assert first.slot is not None and second.slot is not None
    assert not set(first.slot.block_table) & set(second.slot.block_table)
    rig.kv.check_integrity([first, second])


def test_a_chat_that_goes_on_takes_its_own_slot_over() -> None:
    rig = Rig("streams", num_blocks=64)
    first = rig.run([1] * 40)
    assert first.slot is not None
    seq_id = first.slot.seq_id
    rig.kv.park(first)
    second = rig.admit([1] * 40 + [3] * 10)
    assert second.slot is not None
    assert (second.slot.seq_id, second.num_cached) == (seq_id, 40)
    assert rig.operations() == ()


def test_whoever_leaves_last_of_a_prefix_is_parked_the_others_are_freed() -> None:
    rig = Rig()
    first, second = rig.run([1] * 40), rig.run([1] * 40)
    rig.kv.park(first)
    assert rig.kv.num_parked == 0
    rig.kv.park(second)
    assert rig.kv.num_parked == 1
    rig.kv.check_integrity([])


def test_the_least_recently_used_gives_way_from_its_tail() -> None:
    rig = Rig(num_blocks=8)
    first = rig.run([1] * 64)
    assert first.slot is not None
    seq_id = first.slot.seq_id
    rig.kv.park(first)
    rig.kv.park(rig.run([2] * 64))
    rig.operations()
    third = rig.admit([3] * 32)
    assert rig.operations() == (Remove(seq_id, 32),)
    assert rig.kv.lookup(Sequence.of(make_request(9, [1] * 64))).num_tokens == 32
    assert rig.kv.lookup(Sequence.of(make_request(9, [2] * 64))).num_tokens == 48
    rig.kv.check_integrity([third])


def test_exact_reuses_what_a_prompt_computed_and_nothing_else() -> None:
    rig = Rig("streams", num_blocks=64, exact=True)
    first = rig.admit([1] * 33)
    first.tokens += [2] * 31
    rig.kv.computed(first, 64)
    rig.kv.park(first)
    again = Sequence.of(make_request(9, [1] * 33 + [2] * 31 + [5] * 5))
    assert rig.kv.lookup(again).num_tokens == 32  # the prompt's last token was computed alone


def test_only_the_private_tail_is_swapped_and_it_comes_back_behind_the_shared_part() -> None:
    rig = Rig(swap_tokens=1000)
    first, second = rig.run([1] * 40), rig.run([1] * 32 + [2] * 20)
    assert rig.kv.num_private_tokens(second) == 20
    assert second.slot is not None
    rig.operations()
    seq_id = second.slot.seq_id
    rig.kv.swap_out(second)
    assert rig.operations() == (SwapOut(seq_id, 0, 32, 20), Remove(seq_id))
    assert rig.kv.num_swapped_tokens == 20
    second.tokens.append(7)
    rig.kv.admit(second, rig.kv.lookup(second))
    assert first.slot is not None
    assert rig.operations() == (Copy(first.slot.seq_id, seq_id, 32), SwapIn(seq_id, 0, 20))
    assert (second.num_computed, rig.kv.num_swapped) == (52, 0)
    rig.kv.check_integrity([first, second])


def test_a_swapped_tail_is_forgotten_when_its_prefix_is_gone() -> None:
    rig = Rig(swap_tokens=1000)
    first, second = rig.run([1] * 40), rig.run([1] * 32 + [2] * 20)
    rig.kv.swap_out(second)
    rig.kv.release(first)
    rig.kv.admit(second, rig.kv.lookup(second))
    assert (second.num_computed, rig.kv.num_swapped) == (0, 0)


@pytest.mark.parametrize(("num_left", "moves"), [(100, True), (1, False)])
def test_streams_are_gathered_where_that_pays(num_left: int, moves: bool) -> None:
    rig = Rig("streams", num_blocks=64)
    sequences = [rig.run([token] * 200, max_tokens=num_left) for token in (1, 2, 3)]
    rig.kv.park(sequences[1])
    rig.operations()
    running = [sequences[0], sequences[2]]
    rig.kv.gather(running)
    ids = sorted(s.slot.seq_id for s in running if s.slot is not None)
    assert (ids[1] - ids[0] == 1) == moves
    assert any(isinstance(operation, Exchange) for operation in rig.operations()) == moves
    rig.kv.check_integrity(running)


def test_waste_is_the_unwritten_end_of_last_blocks() -> None:
    rig = Rig()
    sequence = rig.admit([1] * 20)
    rig.kv.computed(sequence, 20)
    assert rig.kv.waste() == 12 / 32
