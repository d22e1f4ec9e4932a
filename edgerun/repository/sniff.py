"""What a file really is when it is not the model its name promises.

A failed download leaves a web page, a Git LFS pointer or nothing at all under a model's name. The readers of
both formats ask here first, so that the user reads the cause and not a parser's complaint.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from edgerun.errors import InvalidModelFile

HEAD_BYTES = 512
_PULL_AGAIN = "(a failed download?); delete it and pull again"
_FAILED_DOWNLOADS = ("is an HTML page", "is a server's error message", "begins with nothing but zero bytes")


def describe_wrong_bytes(head: bytes) -> str:
    """What `head`, a file's first bytes, is known to be; "" when nothing is recognised."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<?xml")):
        return "is an HTML page, not a model"
    if text.startswith(b"version https://git-lfs.github.com/spec/"):
        return "is a Git LFS pointer, not the model itself; run `git lfs pull` in its repository"
    if text.startswith((b'{"error', b'{"message', b'{"detail')):
        return "is a server's error message in JSON, not a model"
    if head.startswith(b"PK\x03\x04"):
        return "is a zip archive (or a Python wheel), not a model; unpack it and name the file inside"
    if head.startswith(b"\x1f\x8b"):
        return "is gzip-compressed, not a model; unpack it first"
    if head and not head.strip(b"\0"):
        return "begins with nothing but zero bytes"
    return ""


def advise_on_wrong_bytes(head: bytes) -> str:
    """As describe_wrong_bytes, for a file on the disk, with what to do."""
    what = describe_wrong_bytes(head)
    return f"{what} {_PULL_AGAIN}" if what.startswith(_FAILED_DOWNLOADS) else what


def open_model(path: Path) -> BinaryIO:
    """Open for reading; InvalidModelFile in one line where that cannot be done or the file is empty."""
    try:
        if path.is_dir():
            raise InvalidModelFile(f"{path} is a folder, not a model file", path=str(path))
        file = path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise InvalidModelFile(f"cannot read {path}: {reason}", path=str(path)) from error
    if path.stat().st_size == 0:
        file.close()
        raise InvalidModelFile(f"{path.name} is empty (0 bytes) {_PULL_AGAIN}", path=str(path))
    return file
