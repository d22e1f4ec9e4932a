"""Taking the Unix socket and the port: permissions, what is in the way, and who has it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edgerun.errors import ServerStartError
from edgerun.server.socket import bind_tcp, bind_unix, is_loopback, open_listeners

from .harness import running


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def leave_dead_socket(path: Path) -> None:
    """What a server that was killed leaves behind: a socket file that nobody accepts on."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def test_only_this_user_gets_at_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "new" / "e.sock"
    before = os.umask(0o022)
    try:
        with bind_unix(path):
            assert mode_of(path) == 0o600
            assert mode_of(path.parent) == 0o700
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_dead_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    leave_dead_socket(path)
    with bind_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_live_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    with bind_unix(path):
        with pytest.raises(ServerStartError, match=r"running on .*e\.sock already"):
            bind_unix(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_what_is_no_socket_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ServerStartError, match="not a socket"):
        bind_unix(path)
    assert path.read_text() == "data"


def test_a_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="longer than 107 bytes"):
        bind_unix(tmp_path / ("x" * 120))


def test_a_shared_default_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "edgerun"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ServerStartError, match="does not belong to this user alone"):
        bind_unix(folder / "edgerun.sock")


def test_leaving_removes_our_socket_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    with open_listeners(path, "127.0.0.1", None):
        assert path.exists()
    assert not path.exists()
    with open_listeners(path, "127.0.0.1", None):
        path.unlink()
        leave_dead_socket(path)
    assert path.exists()


def test_addresses_read_as_the_ready_line_has_them(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    with open_listeners(path, "127.0.0.1", 0) as (unix, tcp):
        port = tcp.socket.getsockname()[1]
        assert (unix.address, tcp.address) == (f"unix:{path}", f"http://127.0.0.1:{port}")
    with open_listeners(path, "127.0.0.1", None) as listeners:
        assert len(listeners) == 1


def test_a_failed_port_leaves_no_socket_behind(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    with bind_tcp("127.0.0.1", 0) as taken:
        listeners = open_listeners(path, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ServerStartError), listeners:
            pass
    assert not path.exists()


def test_a_busy_port_names_an_edgerun_that_has_it() -> None:
    with running() as server, pytest.raises(ServerStartError, match="an edgerun server") as refused:
        bind_tcp("127.0.0.1", server.port)
    assert str(server.port) in refused.value.message


def test_a_busy_port_names_the_program_that_has_it() -> None:
    program = (
        "import socket,sys;s=socket.create_server(('127.0.0.1',0));"
        "print(s.getsockname()[1],flush=True);sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        with pytest.raises(ServerStartError, match=f"process {owner.pid}") as refused:
            bind_tcp("127.0.0.1", port)
        owner.communicate("")
    assert "--port" in refused.value.message


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ServerStartError, match="--host"):
        bind_tcp(host, 0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("example.com", False),
    ],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
