"""files: writes are whole or not at all, locks exclude, sizes are readable."""

from __future__ import annotations

import errno
import hashlib
import threading
from pathlib import Path

import pytest

from edgerun.errors import InvalidModelFile, PullFailed
from edgerun.repository.files import disk_errors, human_size, locked, sha256_file, write_atomically


def test_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_hash_reports_its_way(tmp_path: Path) -> None:
    data = b"abc" * 1_000_000
    (tmp_path / "f").write_bytes(data)
    seen: list[tuple[str, int, int]] = []
    assert sha256_file(tmp_path / "f", lambda *step: seen.append(step)) == hashlib.sha256(data).hexdigest()
    assert seen[-1] == ("check", len(data), len(data))
    with pytest.raises(InvalidModelFile):
        sha256_file(tmp_path / "gone")


@pytest.mark.parametrize(
    ("number", "has_advice"), [(errno.ENOSPC, True), (errno.EFBIG, True), (errno.EACCES, False)]
)
def test_disk_errors_are_one_line(tmp_path: Path, number: int, has_advice: bool) -> None:
    with pytest.raises(PullFailed, match=str(tmp_path)) as caught, disk_errors(tmp_path):
        raise OSError(number, "refused")
    assert ("make room" in caught.value.message) == has_advice
    assert caught.value.details["is_local"] is True


def test_lock_is_held_by_one_and_the_other_waits(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "m.lock"
    waiting, order = threading.Event(), []

    def second() -> None:
        with locked(path, lambda *_: waiting.set()):
            order.append("second")

    with locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_lock_is_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), locked(tmp_path / "m.lock"):
        raise RuntimeError
    with locked(tmp_path / "m.lock", lambda *_: pytest.fail("had to wait")):
        pass


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (98362432, "98.4 MB"), (4 * 10**12, "4000.0 GB")],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert human_size(size) == text
