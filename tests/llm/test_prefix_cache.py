"""The radix tree: what is found, who is awaited, what is forgotten."""

from __future__ import annotations

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
