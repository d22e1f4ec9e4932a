"""Progress of a long step on a terminal (one line that is rewritten) or in a log (a line for each tenth)."""

from __future__ import annotations

import shutil
from typing import TextIO


class ProgressLines:
    """A Report (see commands.py) that writes to stream. Call close() at the end: it ends the open line."""

    def __init__(self, stream: TextIO, *, is_terminal: bool) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._stage: str | None = None
        self._tenths = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        is_new = stage != self._stage
        if is_new:
            self.close()
            self._stage, self._tenths = stage, 0
        text = f"    {stage}"
        if total > 0:
            text += f"  {done}/{total} ({100 * done // total} %)"
        elif done > 0:
            text += f"  {done}"
        if self._is_terminal:
            # A line that wraps cannot be rewritten; one that stays may wrap.
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\033[K{text if is_new and done == 0 else text[:width]}")
        elif is_new or (total > 0 and 10 * done // total > self._tenths):
            self._stream.write(f"{text}\n")
        if total > 0:
            self._tenths = 10 * done // total
        self._stream.flush()

    def close(self) -> None:
        if self._stage is not None and self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()
        self._stage = None
