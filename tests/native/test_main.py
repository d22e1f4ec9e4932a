from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgerun.native.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def test_works_before_anything_is_installed() -> None:
    """`make run` calls it in an empty environment: -S hides site-packages, -W error shows any warning."""
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error", "-m", "edgerun.native", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ensure" in done.stdout


def test_failure_is_one_message_and_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "manifest.json").write_text("{")
    monkeypatch.setenv("EDGERUN_NATIVE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["list"]) == 0
    assert "manifest.json" in capsys.readouterr().out


def test_usage_error_is_status_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["no-such-command"])
    assert caught.value.code == 2
