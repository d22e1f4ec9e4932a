"""Files of the store: atomic writes, hashes with progress, locks, and the disk's errors in plain words."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgerun.errors import ConfigError, InvalidModelFile, PullFailed

Progress = Callable[[str, int, int], None]
"""(stage, done, total); bytes, total 0 where unknown. What it raises stops the work and passes through."""

CHUNK_BYTES = 1 << 20
_LOCK_POLL_S = 0.2
# EFBIG: the file-size limit of the process (ulimit -f); Python ignores the signal that comes with it.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_progress(stage: str, done: int, total: int) -> None:
    """For callers that do not watch."""


def human_size(num_bytes: int) -> str:
    """As people read it: 98.4 MB."""
    size, units = float(num_bytes), ("bytes", "kB", "MB", "GB")
    unit = 0
    while size >= 1000 and unit < len(units) - 1:
        size, unit = size / 1000, unit + 1
    return f"{num_bytes} bytes" if unit == 0 else f"{size:.1f} {units[unit]}"


def read_text(path: Path, max_bytes: int) -> str:
    """A small text file of the user's, UTF-8 with or without a BOM. Raises ConfigError naming it."""
    try:
        if path.stat().st_size > max_bytes:
            raise ConfigError(f"{path} is larger than {max_bytes} bytes: it must be another kind of file")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old content or the new, never a part; also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def publish(partial: Path, path: Path) -> None:
    """Give a finished download its final name, after its bytes are safe on the disk."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def sha256_file(path: Path, progress: Progress = no_progress) -> str:
    """Hex digest of a file of any size; reports the stage "check"."""
    digest = hashlib.sha256()
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                progress("check", file.tell(), total)
    except OSError as error:
        raise InvalidModelFile(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    return digest.hexdigest()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the disk's refusals while writing `path` into one line. A full disk keeps what arrived.

    Raises PullFailed with `is_local` in its details: no other source helps.
    """
    try:
        yield
    except OSError as error:
        what = f"cannot write {path}: {error.strerror}"
        if error.errno in _FULL:
            what += "; make room and pull again (what arrived is kept; `edgerun models rm` deletes it)"
        raise PullFailed(what, path=str(path), is_local=True) from error


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raises PullFailed (`is_local`) before a byte is fetched, when the file cannot fit."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise PullFailed(
            f"{human_size(needed_bytes)} are needed in {folder} and {human_size(free)} are free; "
            "make room and pull again",
            is_local=True,
        )


@contextmanager
def locked(path: Path, progress: Progress = no_progress) -> Iterator[None]:
    """Hold the lock file `path`; while another process or thread has it, wait and report the stage "wait".

    The kernel drops the lock with its process, so a crash leaves nothing to clean up.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("wait", 0, 0)
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)
