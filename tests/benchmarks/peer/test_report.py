"""Ratios, limits and the printed table."""

from __future__ import annotations

from tests.benchmarks.peer.report import Line, RowReport


def test_ratios_are_made_round_by_round_and_their_median_is_held_to_the_limit() -> None:
    line = Line("CPU", "s", (1.0, 2.0, 9.0), (2.0, 2.0, 3.0), limit=1.05)
    assert line.ratios == (0.5, 1.0, 3.0)
    assert line.is_met
    assert not Line("tokens/s", "", (97.0,), (100.0,), limit=0.98, at_least=True).is_met


def test_a_limit_without_another_side_is_one_of_our_value() -> None:
    assert Line("worst ITL", "ms", (90.0, 95.0, 300.0), limit=100).is_met
    assert Line("worst ITL", "ms", (90.0,)).is_met is None


def test_the_table_shows_medians_ratio_and_verdict() -> None:
    report = RowReport("row", "what it is", "ours", "-np 16", notes=["a note"])
    report.lines = [Line("CPU", "s", (1.0, 2.0, 3.0), (4.0, 4.0, 4.0), limit=0.3)]
    text = report.markdown()
    assert (
        "| CPU, s | 2.000 (1.000 to 3.000) | 4.000 | **0.500** (0.250 to 0.750) | <= 0.3 **missed** |" in text
    )
    assert "- a note" in text
