"""Parsing of answers and the figures made of them; no server runs."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.peer.load import Chat, Load, Outcome, parse_events, quantile

_CHAT = Chat("You are helpful.", "Hi", 4)


def test_an_event_has_the_time_of_its_last_byte() -> None:
    pieces = [
        (1.0, b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\ndata: {"choi'),
        (2.0, b'ces":[{"delta":{"content":"a"}}]}\n\n'),
        (3.0, b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"length"}]}\n\n'),
        (4.0, b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\ndata: [DONE]\n\n'),
    ]
    parsed = parse_events(pieces)
    assert parsed.events_s == [2.0, 3.0]
    assert (parsed.text, parsed.finish_reason, parsed.is_done) == ("ab", "length", True)
    assert parsed.usage["prompt_tokens"] == 5


@pytest.mark.parametrize(
    "data", [b'data: {"error":{"message":"full"}}\n\n', b'error: {"code":500,"message":"full"}\n\n']
)
def test_an_error_in_the_stream_is_found(data: bytes) -> None:
    parsed = parse_events([(1.0, data)])
    assert "full" in parsed.error
    assert not parsed.is_done


def test_figures_of_a_load() -> None:
    one = Outcome(_CHAT, 0.0, 2.0, (0.5, 0.75, 2.0), "abc", "length", 10, 4, 3)
    other = Outcome(_CHAT, 0.0, 1.0, error="status 500: full")
    load = Load((one, other), wall_s=2.0, cpu_s=1.0)
    assert load.finished == [one]
    assert load.errors == ["status 500: full"]
    assert (load.num_computed_tokens, load.tokens_per_s) == (6, 1.5)
    assert (load.ttft_s(0.5), load.itl_s(1)) == (0.5, 1.25)
    assert one.tokens_per_s == pytest.approx(2 / 1.5)


def test_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([3.0, 1.0, math.nan, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 1) == 3.0
    assert math.isnan(quantile([], 0.5))
