"""A server for one command, in a child process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgerun.errors import ConfigError, EdgerunError, InvalidModelFile, ModelNotFound, ServerStartError
from edgerun.server import local
from edgerun.server.local import error_of, failure_line, local_server


def test_an_error_crosses_to_the_parent_with_its_type() -> None:
    error = InvalidModelFile("x.gguf is cut off\nat byte 7", name="x", size_bytes=7)
    back = error_of(failure_line(error).encode())
    assert type(back) is InvalidModelFile
    assert back.message == error.message
    assert back.details == error.details


@pytest.mark.parametrize("line", [b"", b"ready unix:/x", b"[]", b"{}", b'{"failed": 5}', b"\xff"])
def test_another_line_is_no_error(line: bytes) -> None:
    assert error_of(line) is None


def test_a_child_that_cannot_start_raises_its_error() -> None:
    with pytest.raises(EdgerunError) as raised, local_server(models=["no-such-model"]):
        pass
    assert type(raised.value) is ModelNotFound


def test_a_setting_that_is_wrong_reaches_the_parent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGERUN_PORTT", "5")
    with pytest.raises(ConfigError, match="EDGERUN_PORTT"), local_server():
        pass


@pytest.mark.parametrize("content", [b"", b"GGUF", b"<!DOCTYPE html><html><body>404</body></html>"])
def test_a_file_that_is_no_model_raises_its_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModelFile, match=r"bad\.gguf"), local_server(models=[str(path)]):
        pass


def test_a_child_that_says_nothing_is_an_error() -> None:
    silent = [sys.executable, "-c", "raise SystemExit(3)"]
    with (
        subprocess.Popen(silent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        pytest.raises(ServerStartError, match="status 3"),
    ):
        local.wait_until_ready(process)
