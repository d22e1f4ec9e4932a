"""The radix tree: what is found, who is awaited, what is forgotten."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.llm.prefix_cache import KvSlot, PrefixCache
from edgerun.llm.request import SeqId

ONE, TWO, THREE = [1] * 16, [2] * 16, [3] * 16


def slot(seq_id: int, *blocks: list[int]) -> KvSlot:
    return KvSlot(SeqId(seq_id), [token for block in blocks for token in block])


def test_the_longest_held_prefix_is_found_in_whole_blocks() -> None:
    cache, holder = PrefixCache(16), slot(0, ONE, TWO)
    cache.hold(holder, 31)
    match = cache.match([*ONE, *TWO, 9], 33)
    assert (match.num_blocks, match.slots) == (1, (holder,))
    cache.hold(holder, 32)
    assert cache.match([*ONE, *TWO, 9], 33).num_blocks == 2
    assert cache.match([*ONE, *THREE], 32).num_blocks == 1
    assert cache.match([*TWO, *ONE], 32).num_blocks == 0


def test_no_more_than_asked_for_is_found() -> None:
    cache, holder = PrefixCache(16), slot(0, ONE, TWO)
    cache.hold(holder, 32)
    assert cache.match([*ONE, *TWO], 31).num_blocks == 1


def test_what_another_computes_is_awaited_as_far_as_it_is_common() -> None:
    cache, first = PrefixCache(16), slot(0, ONE, TWO, THREE)
    cache.announce(first, 48)
    match = cache.match([*ONE, *TWO, *ONE], 48)
    assert (match.num_blocks, match.awaited, match.awaited_tokens) == (0, first, 32)
    cache.hold(first, 16)
    match = cache.match([*ONE, *TWO, *ONE], 48)
    assert (match.num_blocks, match.awaited, match.awaited_tokens) == (1, first, 32)
    cache.hold(first, 48)
    assert cache.match([*ONE, *TWO, *ONE], 48).awaited is None


def test_nobody_is_awaited_who_has_left() -> None:
    cache, first = PrefixCache(16), slot(0, ONE, TWO)
    cache.announce(first, 32)
    cache.hold(first, 16)
    cache.drop(first)
    match = cache.match([*ONE, *TWO], 32)
    assert (match.num_blocks, match.awaited) == (0, None)
    cache.check_integrity([])


def test_what_was_held_is_remembered_as_evicted_until_it_is_back() -> None:
    cache, first = PrefixCache(16), slot(0, ONE, TWO)
    assert not cache.match(first.tokens, 32).was_evicted
    cache.hold(first, 32)
    cache.drop(first, 1)
    assert cache.match(first.tokens, 32).was_evicted
    assert not cache.match([*ONE, *THREE], 32).was_evicted
    cache.hold(first, 32)
    assert not cache.match([*first.tokens, *THREE], 48).was_evicted


def test_a_prefix_stays_while_one_of_its_holders_does() -> None:
    cache, first, second = PrefixCache(16), slot(0, ONE, TWO), slot(1, ONE, TWO)
    cache.hold(first, 32)
    cache.hold(second, 32)
    cache.drop(first)
    assert cache.match([*ONE, *TWO], 32).slots == (second,)
    cache.check_integrity([first, second])
    cache.drop(second)
    assert cache.match([*ONE, *TWO], 32).num_blocks == 0
    cache.check_integrity([])


def test_a_cut_holder_keeps_its_first_blocks_and_the_other_all() -> None:
    cache, first, second = PrefixCache(16), slot(0, ONE, TWO), slot(1, ONE, TWO, THREE)
    cache.hold(first, 32)
    cache.hold(second, 48)
    cache.drop(second, 1)
    assert cache.match([*ONE, *TWO, *THREE], 48).slots == (first,)
    assert set(cache.match(ONE, 16).slots) == {first, second}
    assert not cache.match([*ONE, *TWO, 9], 33).was_evicted
    assert cache.match([*ONE, *TWO, *THREE], 48).was_evicted
    cache.check_integrity([first, second])


def test_who_announces_what_another_computes_already_is_not_awaited() -> None:
    cache, first, second = PrefixCache(16), slot(0, ONE, TWO), slot(1, ONE, TWO, THREE)
    cache.announce(first, 32)
    cache.announce(second, 48)
    match = cache.match([*ONE, *TWO, *THREE], 48)
    assert (match.awaited, match.awaited_tokens) == (first, 32)
    cache.hold(first, 32)
    match = cache.match([*ONE, *TWO, *THREE], 48)
    assert (match.num_blocks, match.awaited, match.awaited_tokens) == (2, second, 48)
    cache.drop(second)
    assert cache.match([*ONE, *TWO, *THREE], 48).awaited is None
    cache.check_integrity([first])


def test_a_child_that_is_announced_survives_its_parents_holder() -> None:
    cache, first, second = PrefixCache(16), slot(0, ONE), slot(1, ONE, TWO)
    cache.hold(first, 16)
    cache.hold(second, 16)
    cache.announce(second, 32)
    cache.drop(first)
    match = cache.match([*ONE, *TWO], 32)
    assert (match.slots, match.awaited) == ((second,), second)
    cache.drop(second)
    cache.check_integrity([])


def test_damage_is_noticed() -> None:
    cache, holder = PrefixCache(16), slot(0, ONE, TWO)
    cache.hold(holder, 32)
    with pytest.raises(AssertionError, match="not in the tree"):
        cache.check_integrity([])
    del holder.path[0].slots[holder]
    with pytest.raises(AssertionError, match="hole"):
        cache.check_integrity([holder])


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.lists(st.sampled_from((1, 2)), max_size=4)))
)
def test_the_tree_finds_what_a_search_through_all_slots_finds(
    changes: list[tuple[int, int, list[int]]],
) -> None:
    """Five slots that hold, cut and leave in any order, with prompts that branch in each block."""
    cache = PrefixCache(4)
    slots: dict[int, KvSlot] = {}
    for seq_id, keep, blocks in changes:
        tokens = [token for token in blocks for _ in range(4)]
        longest = max((_common_blocks(held, tokens) for held in slots.values()), default=0)
        assert cache.match(tokens, len(tokens)).num_blocks == longest
        if seq_id in slots:
            cache.drop(slots[seq_id], keep)
            if not slots[seq_id].path:
                del slots[seq_id]
        elif blocks:
            slots[seq_id] = KvSlot(SeqId(seq_id), tokens)
            cache.hold(slots[seq_id], len(tokens))
        cache.check_integrity(list(slots.values()))


def _common_blocks(held: KvSlot, tokens: list[int]) -> int:
    tokens_held = held.tokens[: 4 * len(held.path)]
    pairs = zip(tokens_held[::4], tokens[::4], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
