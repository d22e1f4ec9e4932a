"""Reading a machine's files and commands: this machine's, or a copy of another's under a folder.

Under a sysroot nothing of the real machine is ever read: paths and symbolic links stay inside, and a
command's output comes from `_cmd/<command line>`. Nothing here raises for what a machine may hold.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)

MAX_READ_BYTES = 4 << 20  # the largest file wanted is dpkg's status, some 2 MB
COMMAND_TIMEOUT_S = 10.0  # nvidia-smi takes seconds when it has to wake the driver
_MAX_LINKS = 40  # as the kernel's own limit
# WSL2 puts the driver's tools where no login shell looks for them.
_EXTRA_COMMAND_DIRS = ("/usr/lib/wsl/lib", "/usr/sbin", "/usr/local/cuda/bin")


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """What a command printed on stdout, and whether it exited 0."""

    text: str
    is_ok: bool


def to_int(text: str | None) -> int | None:
    """The whole number that text is, or None."""
    try:
        return int(text or "")
    except ValueError:
        return None


class SystemFiles:
    """The files of one machine. Paths are written without the leading slash."""

    def __init__(self, root: Path | None = None) -> None:
        """root: None reads this machine; else the folder that stands for its `/`."""
        self.is_sysroot = root is not None
        self._root = Path("/") if root is None else root.resolve()

    def read_text(self, path: str) -> str | None:
        """The text, undecodable bytes replaced; None when there is no such readable file."""
        try:
            with self._resolve(path).open("rb") as file:
                return file.read(MAX_READ_BYTES).decode("utf-8", errors="replace")
        except (OSError, ValueError):
            return None

    def read_strings(self, path: str) -> tuple[str, ...]:
        """A device-tree string list: NUL-separated; empty when missing."""
        text = self.read_text(path) or ""
        return tuple(part.strip() for part in text.split("\0") if part.strip())

    def read_int(self, path: str) -> int | None:
        return to_int(self.read_text(path))

    def exists(self, path: str) -> bool:
        try:
            return self._resolve(path).exists()
        except OSError:
            return False

    def is_accessible(self, path: str) -> bool:
        """Whether this user may read and write it; under a sysroot: whether it exists."""
        if self.is_sysroot:
            return self.exists(path)
        return os.access(self._resolve(path), os.R_OK | os.W_OK)

    def glob(self, pattern: str) -> tuple[str, ...]:
        """Matching paths in this class's own form, sorted; links that leave a sysroot are left out."""
        try:
            found = [p for p in self._root.glob(pattern) if self._is_inside(p)]
        except OSError:
            return ()
        return tuple(sorted(str(p.relative_to(self._root)) for p in found))

    def run(self, argv: Sequence[str]) -> CommandOutput | None:
        """Run a command (or read its recorded output); None when it is absent or does not end in time."""
        if self.is_sysroot:
            return self._recorded(argv)
        program = shutil.which(argv[0]) or shutil.which(argv[0], path=os.pathsep.join(_EXTRA_COMMAND_DIRS))
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                env={**os.environ, "LC_ALL": "C"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.debug("%s gave nothing: %s", argv[0], error)
            return None
        return CommandOutput(done.stdout.decode("utf-8", errors="replace"), done.returncode == 0)

    def _recorded(self, argv: Sequence[str]) -> CommandOutput | None:
        # `nvpmodel -q` is recorded as nvpmodel-q, `getconf PAGESIZE` as getconf-PAGESIZE.
        dashed = argv[0] + "".join(a if a.startswith("-") else f"-{a}" for a in argv[1:])
        for name in (dashed, "".join(argv), " ".join(argv)):
            text = self.read_text(f"_cmd/{name.replace('/', '_')}")
            if text is not None:
                return CommandOutput(text, is_ok=True)
        return None

    def _is_inside(self, path: Path) -> bool:
        return not self.is_sysroot or path.resolve().is_relative_to(self._root)

    def _resolve(self, path: str) -> Path:
        """The real place of `path`; under a sysroot absolute links start at the sysroot again."""
        if not self.is_sysroot:
            return self._root / path
        current, num_links = self._root, 0
        todo = deque(PurePosixPath(path).parts)
        while todo:
            part = todo.popleft()
            if part == "/":
                current = self._root
            elif part == "..":
                current = current if current == self._root else current.parent
            elif num_links < _MAX_LINKS and (current / part).is_symlink():
                num_links += 1
                todo.extendleft(reversed(PurePosixPath((current / part).readlink()).parts))
            else:
                current = current / part
        return current
