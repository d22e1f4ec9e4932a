from __future__ import annotations

import socket
from pathlib import Path

import pytest

from edgerun.cli import checks
from edgerun.config import Settings
from tests.cli.fake_server import FakeServer


@pytest.mark.parametrize(
    ("version", "status"), [((3, 9), "fail"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "fail")]
)
def test_python_versions(version: tuple[int, int], status: str) -> None:
    assert checks.check_python(version).status == status


def test_live_stale_and_absent_sockets_are_told_apart(server: FakeServer, tmp_path: Path) -> None:
    assert checks.check_socket(server.socket).message.startswith("a server answers")
    assert checks.check_socket(tmp_path / "absent").status == "ok"
    stale = server.socket.with_name("stale.sock")
    with socket.socket(socket.AF_UNIX) as once:
        once.bind(str(stale))
    found = checks.check_socket(stale)
    assert (found.status, found.mend) == ("warn", f"rm {stale}")


def test_taken_port_fails_unless_our_server_has_it(server: FakeServer, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        alone = Settings(port=port, socket=str(tmp_path / "absent"))
        assert checks.check_port(alone).status == "fail"
        assert checks.check_port(Settings(port=port, socket=str(server.socket))).status == "ok"
    assert checks.check_port(alone).status == "ok"


def test_disk_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    assert checks.check_disk(tmp_path / "a" / "b").message.endswith(f"free for {tmp_path / 'a' / 'b'}")


def test_every_finding_that_is_not_ok_says_how_to_mend_it(home: Path) -> None:
    found = list(checks.run_checks())
    assert {check.name for check in found} >= {"settings", "python", "llama.cpp", "socket", "port", "disk"}
    assert [check for check in found if check.status != "ok" and not check.mend] == []


def test_wrong_setting_is_a_finding_and_the_rest_is_still_checked(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGERUN_PROT", "1")
    found = list(checks.run_checks())
    assert (found[0].name, found[0].status) == ("settings", "fail")
    assert len(found) > 5
