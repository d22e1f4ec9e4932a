from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from edgerun.cli.output import amount, format_bytes, print_json, print_table, progress


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (93_000_000, "93.0 MB"), (2_500_000_000, "2.5 GB")],
)
def test_bytes_count_in_thousands(num_bytes: int, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@pytest.mark.parametrize(
    ("done", "total", "in_bytes", "expected"),
    [
        (0, 0, False, ""),
        (3, 0, False, "3"),
        (0, 78, False, "0 of 78"),
        (5_000_000, 93_000_000, False, "5.0 MB of 93.0 MB"),
        (0, 500, True, "0 B of 500 B"),
    ],
)
def test_amount_says_how_far_a_step_is(done: int, total: int, in_bytes: bool, expected: str) -> None:
    assert amount(done, total, in_bytes=in_bytes) == expected


def test_table_off_a_terminal_is_lines_with_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [("1", "[bold]x"), ("2", "y")])
    assert capsys.readouterr().out == "1\t[bold]x\n2\ty\n"


def test_json_is_valid_for_any_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"file": os.fsdecode(b"caf\xe9"), "label": "Käse"}
    for encoding in ("utf-8", "ascii"):
        path = tmp_path / encoding
        with path.open("w", encoding=encoding, errors="replace") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            print_json(value)
        assert json.loads(path.read_text(encoding="utf-8")) == value


def test_progress_off_a_terminal_names_each_stage_once(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("pull m") as report:
        for done in range(3):
            report("download", done, 3)
        report("check", 0, 0)
    captured = capsys.readouterr()
    assert captured.err == "pull m: download\npull m: check\n"
    assert captured.out == ""
