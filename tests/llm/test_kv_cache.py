"""What the cache keeps, shares and gives up, and the operations that it notes."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edgerun.llm.chunks import ChunkRule
from edgerun.llm.kv_cache import KvCache, KvCacheConfig
from edgerun.llm.request import SeqId
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import Copy, Exchange, KvOperation, Remove, SwapDrop, SwapIn, SwapOut

from .fakes import Cell, FakeRunner, make_request

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


def test_an_answer_that_another_prompt_leaves_early_is_copied_while_ids_are_free() -> None:
    rig = Rig("streams", num_blocks=64)
    first = rig.run([1] * 100)
    assert first.slot is not None
    seq_id = first.slot.seq_id
    rig.kv.park(first)
    second = rig.admit([1] * 40 + [3] * 10)
    assert second.slot is not None
    assert rig.operations() == (Copy(seq_id, second.slot.seq_id, 40),)
    assert rig.kv.num_parked == 1
    rig.kv.check_integrity([second])


def test_without_a_free_id_the_parked_slot_is_cut_and_taken_over() -> None:
    rig = Rig("streams", num_blocks=64, num_seq_ids=1)
    first = rig.run([1] * 100)
    assert first.slot is not None
    seq_id = first.slot.seq_id
    rig.kv.park(first)
    second = rig.admit([1] * 40 + [3] * 10)
    assert second.num_cached == 40
    assert rig.operations() == (Remove(seq_id, 40),)
    assert rig.kv.num_parked == 0
    rig.kv.check_integrity([second])


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


def test_blocks_that_are_shared_with_a_parked_slot_do_not_count_as_room_too() -> None:
    rig = Rig(num_blocks=5)
    running = rig.run([9] * 16)
    rig.kv.park(rig.run([1] * 64))
    new = Sequence.of(make_request(9, [1] * 32 + [2] * 60))
    lookup = rig.kv.lookup(new)
    assert lookup.num_tokens == 32
    assert rig.kv.pool.num_available == 4
    assert not rig.kv.can_admit(lookup, 65, 0)
    assert not rig.kv.can_admit(lookup, 64, 1)
    assert rig.kv.can_admit(lookup, 64, 0)
    rig.kv.admit(new, lookup)
    assert rig.kv.grow(new, 64)
    rig.kv.check_integrity([running, new])


def test_exact_reuses_what_a_prompt_computed_and_nothing_else() -> None:
    rig = Rig("streams", num_blocks=64, exact=True)
    first = rig.admit([1] * 33)
    first.tokens += [2] * 31
    rig.kv.computed(first, 64)
    rig.kv.park(first)
    again = Sequence.of(make_request(9, [1] * 33 + [2] * 31 + [5] * 5))
    assert rig.kv.lookup(again).num_tokens == 32  # the prompt's last token was computed alone


def test_exact_reuses_no_more_after_a_cut() -> None:
    rig = Rig(num_blocks=8, exact=True)
    first = rig.admit([1] * 40)
    first.tokens += [2] * 60
    assert rig.kv.grow(first, 100)
    rig.kv.computed(first, 100)
    rig.kv.park(first)
    second = rig.admit([3] * 40)  # takes two blocks of the answer
    assert rig.operations()[0] == Remove(SeqId(0), 80)
    again = Sequence.of(make_request(9, [1] * 40 + [2] * 50))
    assert rig.kv.lookup(again).num_tokens == 32
    rig.kv.check_integrity([second])


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
    rig.operations()
    rig.kv.admit(second, rig.kv.lookup(second))
    assert (second.num_computed, rig.kv.num_swapped) == (0, 0)
    assert rig.operations() == (SwapDrop(0),)


def test_in_streams_all_of_a_sequence_is_swapped() -> None:
    rig = Rig("streams", num_blocks=64, swap_tokens=52)
    rig.run([1] * 40)
    second = rig.run([1] * 32 + [2] * 20)
    assert rig.kv.num_private_tokens(second) == 52
    assert rig.kv.has_swap_space(52)
    assert not rig.kv.has_swap_space(53)
    rig.kv.swap_out(second)
    assert not rig.kv.has_swap_space(1)
    rig.kv.drop_swapped(second)
    assert rig.kv.has_swap_space(52)


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


def test_a_gathered_stream_moves_to_a_free_id_and_leaves_its_own() -> None:
    rig = Rig("streams", num_blocks=64)
    first, second, third = (rig.run([token] * 40) for token in (1, 2, 3))
    rig.kv.release(second)
    rig.operations()
    rig.kv.gather([first, third])
    assert rig.operations() == (Copy(SeqId(2), SeqId(1), 40), Remove(SeqId(2)))
    rig.kv.check_integrity([first, third])
    new = rig.admit([4] * 20)
    assert new.slot is not None
    assert new.slot.seq_id == 2


def test_neighbours_are_left_where_they_are() -> None:
    rig = Rig("streams", num_blocks=64)
    sequences = [rig.run([token] * 40) for token in (1, 2, 3)]
    rig.kv.gather(sequences[1:])
    rig.kv.gather(sequences[:1])
    assert not rig.kv.has_operations


def test_waste_is_the_unwritten_end_of_last_blocks() -> None:
    rig = Rig()
    sequence = rig.admit([1] * 20)
    rig.kv.computed(sequence, 20)
    assert rig.kv.waste() == 12 / 32


class CacheFuzz(RuleBasedStateMachine):
    """Any order of coming, growing, leaving and giving way, with what is noted carried out on cells.

    can_admit promises that admit and grow succeed; a sequence's cells are its tokens.
    """

    layout: Literal["unified", "streams"] = "unified"
    exact = False

    @initialize(num_seq_ids=st.integers(1, 5), num_blocks=st.integers(2, 16))
    def begin(self, num_seq_ids: int, num_blocks: int) -> None:
        is_unified = self.layout == "unified"
        self.max_tokens = 16 * (num_blocks if is_unified else 5)
        self.kv = KvCache(
            KvCacheConfig(
                self.layout,
                num_blocks if is_unified else 5 * num_seq_ids,
                num_seq_ids,
                RULE,
                exact=self.exact,
                swap_tokens=150,
            )
        )
        self.runner = FakeRunner(is_unified=is_unified)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_requests = 0

    @rule(
        family=st.integers(0, 2),
        common=st.integers(1, 70),
        own=st.integers(0, 20),
        max_tokens=st.integers(1, 90),
    )
    def come(self, family: int, common: int, own: int, max_tokens: int) -> None:
        self.num_requests += 1
        tokens = [1 + (family * 7 + i) % 50 for i in range(common)]
        tokens = [*tokens, *(51 + self.num_requests for _ in range(own))][: self.max_tokens]
        self.waiting.append(Sequence.of(make_request(self.num_requests, tokens, max_tokens)))

    @rule(which=st.integers(0, 9), size=st.integers(1, 90), spare_blocks=st.integers(0, 3))
    def admit(self, which: int, size: int, spare_blocks: int) -> None:
        sequence = self.pick(self.waiting, which)
        if sequence is None:
            return
        lookup, swapped = self.kv.lookup(sequence), sequence.swapped
        start = lookup.num_tokens
        if swapped is not None and start >= swapped.start:
            start = swapped.start + swapped.num_tokens
        assert start < sequence.num_tokens, "at least one token is left to compute"
        end = min(start + size, sequence.num_tokens)
        can = self.kv.can_admit(lookup, end, spare_blocks)
        if not self.running and not spare_blocks:
            assert can or end > 16 * self.kv.pool.num_blocks, "an empty cache takes what fits"
        if not can:
            return
        self.kv.admit(sequence, lookup)
        assert sequence.num_computed == start, "it goes on where the lookup said"
        assert self.kv.grow(sequence, end)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        assert self.kv.pool.num_available >= spare_blocks
        self.compute(sequence, end)

    @rule(which=st.integers(0, 9), count=st.integers(1, 30))
    def go_on(self, which: int, count: int) -> None:
        sequence = self.pick(self.running, which)
        if sequence is None:
            return
        end = min(sequence.num_computed + count, self.max_tokens)
        if self.kv.grow(sequence, end):
            sequence.tokens += [101 + i % 3 for i in range(sequence.num_tokens, end)]
            self.compute(sequence, end)

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        sequence = self.pick(self.running, which)
        if sequence is not None:
            self.running.remove(sequence)
            self.kv.park(sequence)

    @rule(which=st.integers(0, 9))
    def lose(self, which: int) -> None:
        sequence = self.pick(self.running, which)
        if sequence is not None:
            self.running.remove(sequence)
            self.kv.release(sequence)

    @rule(which=st.integers(0, 9))
    def give_way(self, which: int) -> None:
        sequence = self.pick(self.running, which)
        if sequence is None or sequence.num_tokens > self.max_tokens:
            return
        if self.kv.has_swap_space(self.kv.num_private_tokens(sequence)):
            self.kv.swap_out(sequence)
        else:
            self.kv.park(sequence)
        self.running.remove(sequence)
        self.waiting.append(sequence)

    @rule(which=st.integers(0, 9))
    def leave_the_queue(self, which: int) -> None:
        sequence = self.pick(self.waiting, which)
        if sequence is not None:
            self.waiting.remove(sequence)
            self.kv.drop_swapped(sequence)

    @rule()
    def gather(self) -> None:
        self.kv.gather(self.running)

    @rule()
    def evict_one(self) -> None:
        num_parked = self.kv.num_parked
        assert self.kv.evict_one() == (num_parked > 0)
        assert self.kv.num_parked == max(0, num_parked - 1)

    def pick(self, sequences: list[Sequence], which: int) -> Sequence | None:
        return sequences[which % len(sequences)] if sequences else None

    def compute(self, sequence: Sequence, end: int) -> None:
        self.carry_out()
        assert sequence.slot is not None
        cells = self.runner.cells.setdefault(sequence.slot.seq_id, [])
        cells += map(Cell, sequence.tokens[len(cells) : end])
        self.kv.computed(sequence, end)
        if end == sequence.num_tokens:
            sequence.tokens.append(101 + end % 3)

    def carry_out(self) -> None:
        for operation in self.kv.take_operations():
            self.runner._operate(operation)

    @invariant()
    def accounting_and_cells_agree(self) -> None:
        self.carry_out()
        self.kv.check_integrity(self.running)
        self.runner.check_integrity(self.kv.held())
        for sequence in self.running:
            assert sequence.slot is not None
            cells = self.runner.cells.get(sequence.slot.seq_id, [])
            assert [cell.token for cell in cells] == sequence.tokens[: sequence.num_computed]
        if self.layout == "unified":
            assert self.runner.num_used <= 16 * (self.kv.pool.num_blocks - self.kv.pool.num_free)
        assert self.kv.num_swapped == len(self.runner.swapped)
        assert sum(map(len, self.runner.swapped.values())) == self.kv.num_swapped_tokens <= 150
        assert 0 <= self.kv.waste() < 1


class StreamsCacheFuzz(CacheFuzz):
    layout = "streams"


class ExactCacheFuzz(CacheFuzz):
    layout = "streams"
    exact = True


TestCacheFuzz = CacheFuzz.TestCase
TestStreamsCacheFuzz = StreamsCacheFuzz.TestCase
TestExactCacheFuzz = ExactCacheFuzz.TestCase
TestCacheFuzz.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStreamsCacheFuzz.settings = TestExactCacheFuzz.settings = TestCacheFuzz.settings
