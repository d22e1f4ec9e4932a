from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgerun.cli.main import cli
from tests.cli.fake_server import FakeServer, running

Run = Callable[..., Result]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    # Not tmp_path: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as folder, running(FakeServer(Path(folder) / "s.sock")) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: no settings, no models, no server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def run(home: Path) -> Run:
    """Run edgerun's command line in this process; stdin is empty unless given."""

    def run(*args: str, stdin: str = "", **env: str) -> Result:
        return CliRunner().invoke(cli, args, input=stdin, env=env)

    return run


@pytest.fixture
def ask(run: Run, server: FakeServer) -> Run:
    """As `run`, with the fake server as the running one."""

    def ask(*args: str, stdin: str = "") -> Result:
        return run(*args, stdin=stdin, EDGERUN_SOCKET=str(server.socket))

    return ask
