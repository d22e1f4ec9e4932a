"""A bounded walk over protobuf's wire format, enough to read what an ONNX file declares.

Source: https://protobuf.dev/programming-guides/encoding/. Reads through a window of a file: fields that are
not asked for (weights of gigabytes) are skipped by their length and never read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

_WINDOW_BYTES = 1 << 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class MalformedProtobuf(Exception):
    """The bytes are no protobuf message of that extent."""


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes [start, end) of the file that hold a nested message, a text or packed numbers."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class Wire:
    """Random access to an open file. Not thread-safe; the caller owns the descriptor."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes
        self._window = b""
        self._window_start = 0

    def fields(self, span: Span) -> Iterator[tuple[int, int | Span]]:
        """(field number, value) of a message in order: int for numbers, Span for everything with a length."""
        at = span.start
        while at < span.end:
            tag, at = self._varint(at, span.end)
            number, wire_type = tag >> 3, tag & 7
            if number == 0:
                raise MalformedProtobuf("field number 0")
            if wire_type == _VARINT:
                value, at = self._varint(at, span.end)
                yield number, value
            elif wire_type == _BYTES:
                length, at = self._varint(at, span.end)
                if length > span.end - at:
                    raise MalformedProtobuf("a field longer than its message")
                yield number, Span(at, at + length)
                at += length
            elif wire_type in (_FIXED64, _FIXED32):
                length = 8 if wire_type == _FIXED64 else 4
                yield number, int.from_bytes(self.read(Span(at, at + length), span.end), "little")
                at += length
            else:  # groups (3, 4) are obsolete and not used by ONNX
                raise MalformedProtobuf(f"wire type {wire_type}")

    def read(self, span: Span, end: int | None = None) -> bytes:
        """The bytes of a span; callers bound its length first."""
        if span.end > (self.size_bytes if end is None else end):
            raise MalformedProtobuf("a field longer than its message")
        data = os.pread(self._fd, span.num_bytes, span.start)
        if len(data) != span.num_bytes:
            raise MalformedProtobuf("the file ended early")
        return data

    def _byte(self, at: int) -> int:
        index = at - self._window_start
        if not 0 <= index < len(self._window):
            self._window = os.pread(self._fd, _WINDOW_BYTES, at)
            self._window_start, index = at, 0
            if not self._window:
                raise MalformedProtobuf("the file ended early")
        return self._window[index]

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
            if at >= end:
                raise MalformedProtobuf("a number that is cut off")
            byte = self._byte(at)
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise MalformedProtobuf("a number of more than 10 bytes")


def signed(value: int) -> int:
    """int64 fields are written as two's complement in 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
