from __future__ import annotations

import io

from edgerun.native.progress import ProgressLines


def test_log_gets_a_line_for_each_stage_and_each_tenth() -> None:
    stream = io.StringIO()
    progress = ProgressLines(stream, is_terminal=False)
    progress("unpacking", 0, 0)
    for step in range(1, 101):
        progress("compiling", step, 100)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0].strip() == "unpacking"
    assert [line.split()[1] for line in lines[1:]] == ["1/100", *(f"{10 * n}/100" for n in range(1, 11))]
    assert "\r" not in stream.getvalue()


def test_terminal_rewrites_one_line_for_each_stage() -> None:
    stream = io.StringIO()
    progress = ProgressLines(stream, is_terminal=True)
    progress("unpacking", 0, 0)
    for step in range(1, 101):
        progress("compiling", step, 100)
    progress.close()
    assert stream.getvalue().count("\n") == 2
    assert stream.getvalue().endswith("compiling  100/100 (100 %)\n")


def test_count_without_a_known_total_is_shown_without_percent() -> None:
    stream = io.StringIO()
    progress = ProgressLines(stream, is_terminal=True)
    progress("installing", 0, 0)
    progress("installing", 7, 0)
    assert stream.getvalue().endswith("installing  7")
    assert "%" not in stream.getvalue()
