"""How a step's decodes are cut into calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgerun.llm.llama_runner import split_by_length
from edgerun.llm.request import SeqId
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import ScheduledChunk

from .fakes import make_request


def decodes(lengths: list[int]) -> list[ScheduledChunk]:
    sequence = Sequence.of(make_request(1, [1]))
    return [
        ScheduledChunk(sequence, SeqId(i), start, 1, wants_token=True, is_decode=True)
        for i, start in enumerate(lengths)
    ]


def split(lengths: list[int], cells_per_pass: int) -> list[list[int]]:
    return [[c.start for c in call] for call in split_by_length(decodes(lengths), cells_per_pass)]


def test_a_long_stream_beside_short_ones_is_a_call_of_its_own() -> None:
    assert split([100] * 8 + [4000], 1500) == [[100] * 8, [4000]]
    assert split([4000] + [100] * 8, 1500) == [[4000], [100] * 8]


def test_streams_of_about_one_length_share_a_call() -> None:
    assert split([500, 620, 480, 700], 1500) == [[500, 620, 480, 700]]


def test_nothing_is_split_where_a_pass_costs_more_than_it_saves() -> None:
    assert split([100, 4000], 10_000) == [[100, 4000]]
    assert split([100] * 8 + [4000], 0) == [[100] * 8 + [4000]]


@given(st.lists(st.integers(0, 8000), min_size=1, max_size=7), st.integers(1, 5000))
def test_the_cut_is_the_cheapest_of_all(lengths: list[int], cells_per_pass: int) -> None:
    def cost(runs: list[list[int]]) -> int:
        return sum(cells_per_pass + len(run) * max(run) for run in runs)

    runs = split(lengths, cells_per_pass)
    assert [length for run in runs for length in run] == lengths
    cuts = len(lengths) - 1
    for mask in range(2**cuts):
        other, run = [], [lengths[0]]
        for i, length in enumerate(lengths[1:]):
            if mask >> i & 1:
                other.append(run)
                run = []
            run.append(length)
        assert cost(runs) <= cost([*other, run])
