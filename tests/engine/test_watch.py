from __future__ import annotations

import pytest

from edgerun.engine.messages import Pong
from edgerun.engine.watch import Watch


def pong(step_age_s: float = 0.0, load_age_s: float = 0.0) -> Pong:
    return Pong(step_age_s=step_age_s, load_age_s=load_age_s)


def turns_until_verdict(watch: Watch, most: int = 1000) -> int:
    for num_turns in range(most):
        if watch.verdict:
            return num_turns
        watch.turn()
    raise AssertionError("no verdict")


def test_one_ping_at_a_time_and_a_new_one_after_each_answer() -> None:
    watch = Watch(120)
    assert [watch.turn() for _ in range(3)] == [True, False, False]
    watch.take(pong())
    assert watch.turn()


def test_silence_is_trouble_first_and_then_the_end() -> None:
    watch = Watch(120)
    for _ in range(2):
        watch.turn()
    assert watch.trouble == ""
    watch.turn()
    assert "not answered for 3 s" in watch.trouble
    assert turns_until_verdict(watch) == 27  # 30 s in all
    assert watch.verdict == "no sign of life for 30 s"
    assert watch.verdict in watch.trouble


def test_an_answer_at_the_last_moment_counts() -> None:
    watch = Watch(120)
    for _ in range(29):
        watch.turn()
    assert watch.trouble
    watch.take(pong())
    assert (watch.trouble, watch.verdict) == ("", "")
    assert turns_until_verdict(watch) == 30


def test_a_short_limit_makes_short_turns_and_still_some() -> None:
    watch = Watch(0.4)
    assert watch.interval_s == pytest.approx(0.1)
    assert turns_until_verdict(watch) == 4


def test_too_long_a_step_must_be_told_twice_in_a_row() -> None:
    """Once may be a machine that was frozen: the step ends as soon as it goes on."""
    watch = Watch(60)
    watch.take(pong(step_age_s=600))
    assert watch.verdict == ""
    watch.take(pong(step_age_s=0.2))
    watch.take(pong(step_age_s=58.5))
    assert watch.verdict == ""
    assert "in one step for 58 s" in watch.trouble
    watch.take(pong(step_age_s=59.5))  # within the limit of 60
    assert watch.verdict == "one step has taken 59.5 s"


def test_a_load_may_take_much_longer_than_a_step() -> None:
    watch = Watch(60)
    for _ in range(2):
        watch.take(pong(load_age_s=1700))
    assert (watch.verdict, watch.trouble) == ("", "")
    for _ in range(2):
        watch.take(pong(load_age_s=1900))
    assert watch.verdict == "one load has taken 1900 s"


def test_a_verdict_stands() -> None:
    watch = Watch(4)
    turns_until_verdict(watch)
    before = watch.verdict
    watch.take(pong())
    assert watch.verdict == before != ""
