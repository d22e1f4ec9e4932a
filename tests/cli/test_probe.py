from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run

KEYS = {
    *("board", "soc", "jetpack", "l4t", "cuda", "tensorrt", "power_mode"),
    *("cpu", "memory", "accelerators", "providers", "notes"),
}


def test_json_of_a_sysroot_is_the_document_of_the_contract(run: Run, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n")
    result = run("probe", "--json", "--sysroot", str(tmp_path))
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert set(report) == KEYS
    assert report["memory"]["total_bytes"] == 8_000_000 * 1024
    assert {choice["kind"] for choice in report["providers"]} == {"llm", "vision"}


def test_text_names_both_kinds_of_models(run: Run, tmp_path: Path) -> None:
    shown = run("probe", "--sysroot", str(tmp_path)).stdout
    assert "Language models" in shown
    assert "Vision models" in shown


def test_sysroot_that_is_not_there_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    assert run("probe", "--sysroot", str(tmp_path / "absent")).exit_code == 2
