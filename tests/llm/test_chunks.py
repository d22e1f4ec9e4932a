"""Whatever time, room and the cache allow, each token of a prompt is computed by the same kind of kernel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.llm.chunks import ChunkRule

WITHOUT_FLASH = ChunkRule.of(flash_attention=False)
WITH_FLASH = ChunkRule.of(flash_attention=True)
RULES = (WITHOUT_FLASH, WITH_FLASH, ChunkRule(16, 16))
ENOUGH = 10**6

rules = st.sampled_from(RULES)
# Around the places where something changes, and any.
lengths = st.one_of(st.integers(1, 200), st.integers(1, 2000))


def cut(
    rule: ChunkRule, start: int, num_tokens: int, rooms: list[int], most: int = 0
) -> list[tuple[int, int]]:
    """Start and end of each piece from `start` on. Steps without room are passed over, and after the last one
    of `rooms` there is plenty."""
    pieces: list[tuple[int, int]] = []
    for room in [*rooms, *[ENOUGH] * (num_tokens + 1)]:
        if start == num_tokens:
            return pieces
        size = rule.size(start, num_tokens, room, most=most)
        assert 0 <= size <= max(room, most)
        if size:
            pieces.append((start, start + size))
        start += size
        assert start <= num_tokens
    raise AssertionError("the prompt is never complete")


def is_long(rule: ChunkRule, pieces: list[tuple[int, int]]) -> dict[int, bool]:
    """For each token: whether it is in a piece that takes the kernels of long ones."""
    return {i: end - start >= rule.min_chunk for start, end in pieces for i in range(start, end)}


def cold(rule: ChunkRule, num_tokens: int) -> dict[int, bool]:
    return is_long(rule, cut(rule, 0, num_tokens, []))


@given(rules, lengths, st.integers(0, 2000), st.lists(st.integers(0, 300)), st.booleans())
def test_each_token_is_computed_once_by_the_kernels_of_a_cold_run(
    rule: ChunkRule, num_tokens: int, num_found: int, rooms: list[int], must_advance: bool
) -> None:
    # What must advance has at least the smallest step that LlmSettings resolve to (see resolving.py).
    most = 128 if must_advance else 0
    start = rule.reusable(min(num_found, num_tokens), num_tokens)
    pieces = cut(rule, start, num_tokens, rooms, most)
    assert [i for piece in pieces for i in range(*piece)] == list(range(start, num_tokens))
    in_one_go = cold(rule, num_tokens)
    assert is_long(rule, pieces) == {i: in_one_go[i] for i in range(start, num_tokens)}


@given(rules, lengths, st.integers(0, 2000))
def test_what_is_reused_was_found_and_leaves_something_to_compute(
    rule: ChunkRule, num_tokens: int, num_found: int
) -> None:
    reused = rule.reusable(num_found, num_tokens)
    assert 0 <= reused <= min(num_found, num_tokens - 1)
    assert rule.reusable(reused, num_tokens) == reused


@given(rules, lengths, st.integers(0, 127))
def test_what_must_advance_does_within_its_limit(rule: ChunkRule, num_tokens: int, room: int) -> None:
    start = 0
    while start < num_tokens:
        size = rule.size(start, num_tokens, room, most=128)
        assert 0 < size <= 128
        start += size


@given(rules, lengths, st.integers(0, 2000))
def test_with_the_room_of_a_smallest_step_there_is_always_a_piece(
    rule: ChunkRule, num_tokens: int, num_found: int
) -> None:
    start = rule.reusable(min(num_found, num_tokens), num_tokens)
    while start < num_tokens:
        size = rule.size(start, num_tokens, 128)
        assert 0 < size <= 128
        start += size


@given(rules, lengths, st.integers(0, 300))
def test_no_room_gives_no_piece(rule: ChunkRule, num_tokens: int, room: int) -> None:
    assert rule.size(0, num_tokens, 0) == 0
    assert rule.size(0, num_tokens, room) <= room


@pytest.mark.parametrize(
    ("rule", "num_tokens", "room", "pieces"),
    [
        (WITHOUT_FLASH, 1, ENOUGH, [(0, 1)]),
        (WITHOUT_FLASH, 2, ENOUGH, [(0, 1), (1, 2)]),
        (WITHOUT_FLASH, 50, ENOUGH, [(0, 49), (49, 50)]),
        # By fours; what is left of the body is never a single token.
        (WITHOUT_FLASH, 50, 22, [(0, 20), (20, 40), (40, 49), (49, 50)]),
        (WITHOUT_FLASH, 34, 32, [(0, 31), (31, 33), (33, 34)]),
        (WITH_FLASH, 40, ENOUGH, [(0, 32), (32, 40)]),
        (WITH_FLASH, 96, ENOUGH, [(0, 80), (80, 96)]),
        (WITH_FLASH, 97, ENOUGH, [(0, 96), (96, 97)]),
        (WITH_FLASH, 200, 100, [(0, 96), (96, 192), (192, 200)]),
        (WITH_FLASH, 180, 100, [(0, 96), (96, 176), (176, 180)]),
        # 64 are left to the second piece.
        (WITH_FLASH, 150, 100, [(0, 80), (80, 144), (144, 150)]),
    ],
)
def test_cuts_worked_out_by_hand(
    rule: ChunkRule, num_tokens: int, room: int, pieces: list[tuple[int, int]]
) -> None:
    assert cut(rule, 0, num_tokens, [room] * len(pieces)) == pieces


def test_a_body_that_cannot_be_cut_waits_until_it_fits_whole() -> None:
    assert WITH_FLASH.size(0, 120, 111) == 0  # two pieces of 64 are more than its 112 tokens
    assert WITH_FLASH.size(0, 120, 112) == 112
    assert WITH_FLASH.size(0, 120, 10, most=128) == 112


def test_a_piece_that_begins_within_a_block_ends_where_one_does() -> None:
    assert WITH_FLASH.size(21, 400, 100) == 112 - 21
    assert WITHOUT_FLASH.size(21, 200, 40) == 60 - 21
    assert WITH_FLASH.size(21, 400, 100) == 112 - 21


def test_a_found_prefix_is_given_up_in_part_where_the_rest_would_be_too_short() -> None:
    # The body of 200 tokens ends at 192; 64 of it must be left, or nothing.
    assert [WITH_FLASH.reusable(found, 200) for found in (0, 128, 144, 191, 192, 199)] == [
        0,
        128,
        128,
        128,
        192,
        192,
    ]
    # A short body takes the kernels of short pieces anyway.
    assert WITH_FLASH.reusable(48, 64) == 48
    assert [WITHOUT_FLASH.reusable(found, 50) for found in (47, 48, 49, 50)] == [47, 47, 49, 49]


@given(rules, lengths, st.integers(0, 300))
def test_the_long_body_is_computed_alike_in_every_prompt_that_goes_on_from_it(
    rule: ChunkRule, num_tokens: int, num_more: int
) -> None:
    end = rule.long_body(num_tokens)
    for length in (num_tokens, num_tokens + num_more):
        kernels = cold(rule, length)
        assert all(kernels[i] for i in range(end))
