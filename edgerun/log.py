"""Log lines: plain text on stderr, one line a record, with the time and the request they belong to.

2026-11-30T21:15:04.123+01:00 INFO    req-7f3a edgerun.server.chat: finished after 24 tokens

Prompts, answers and pictures are never logged; that is up to each caller, there is no filter for it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import TextIO

_request_id: ContextVar[str] = ContextVar("request_id", default="-")


@contextmanager
def request_id(value: str) -> Iterator[None]:
    """Lines logged inside, in this thread or asyncio task, carry `value`."""
    token = _request_id.set(value)
    try:
        yield
    finally:
        _request_id.reset(token)


def setup(level: str, stream: TextIO | None = None) -> None:
    """Send edgerun's lines from `level` on, and warnings of everybody else, to stream (default stderr).

    Called once by a process's entry point, never on import. Calling it again replaces the former setup.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("edgerun").setLevel(level.upper())


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        # A line break in a value must not look like a second record.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{time} {record.levelname:<7} {_request_id.get()} {record.name}: {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
