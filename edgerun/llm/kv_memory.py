"""Where llama.cpp's KV cache lies in main memory, and how much of that is really there.

llama.cpp clears the cache when it makes it, so that every page of it is resident though nothing was written.
Pages handed back to the kernel come back as zeros when they are touched, which is what was cleared into them.
Linux with glibc only, and only an optimisation: whatever is not exactly as expected is left alone.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

# A block that glibc's malloc mapped on its own starts at a page with two words: nothing, and its size with
# this flag (IS_MMAPPED in malloc.c). Below 32 MB (its largest threshold) a block may lie in the heap instead.
_IS_MMAPPED = 2
_MIN_BYTES = 32 << 20
_MAX_SLACK_BYTES = 64 << 10  # the header, ggml's alignment, and the rest of the last page
_WORD_BYTES = 8
_MADV_NOHUGEPAGE = 15  # asm-generic/mman-common.h; Python 3.10's mmap has it only where it was built with it


@dataclass(frozen=True, slots=True)
class Mapping:
    """Anonymous, private, writable memory: addresses start .. end - 1."""

    start: int
    end: int


def large_mappings() -> frozenset[Mapping]:
    """The large anonymous mappings of this process now; none where /proc does not tell."""
    return frozenset(m for m in _read_mappings() if m.end - m.start >= _MIN_BYTES)


def _read_mappings() -> Iterator[Mapping]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)  # address perms offset dev inode path
        if len(fields) == 5 and fields[1] == "rw-p" and fields[4] == "0":
            start, _, end = fields[0].partition("-")
            yield Mapping(int(start, 16), int(end, 16))


@dataclass(frozen=True, slots=True)
class KvRegion:
    """Whole pages of one KV cache: size_bytes from address `start` on. Valid while the context is open."""

    start: int
    size_bytes: int

    @classmethod
    def find(cls, before: frozenset[Mapping], kv_bytes: int) -> KvRegion | None:
        """The block of kv_bytes that was allocated and cleared since `before`; None when that is not certain.

        Neighbouring mappings show as one, so the block is looked for inside them, by malloc's own note of its
        size.
        """
        if kv_bytes < _MIN_BYTES:
            return None
        found: list[KvRegion] = []
        for mapping in large_mappings() - before:
            # Starts from which kv_bytes still fit.
            last = mapping.end - kv_bytes
            if last >= mapping.start:
                found += _blocks(mapping.start, last, mapping.end, kv_bytes)
        if len(found) != 1 or not found[0].is_clear():
            logger.debug("%d blocks of memory look like the KV cache; nothing is handed back", len(found))
            return None
        return found[0]

    def is_clear(self) -> bool:
        """Whether each page begins with zeros: what a cache looks like that nothing was written to."""
        return not self._words()[:: mmap.PAGESIZE // _WORD_BYTES].any()

    def hand_back(self) -> None:
        """Give the pages to the kernel. Only before anything was written."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if _has_huge_pages_always():
            # Else the first write to each 2 MB would bring all of it back.
            libc.madvise(self.start, self.size_bytes, _MADV_NOHUGEPAGE)
        if libc.madvise(self.start, self.size_bytes, mmap.MADV_DONTNEED) != 0:
            logger.debug("madvise failed with errno %d", ctypes.get_errno())

    def resident_bytes(self) -> int:
        """How much of it is in memory now; size_bytes where the kernel does not tell."""
        libc = ctypes.CDLL(None)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        pages = np.zeros(self.size_bytes // mmap.PAGESIZE, dtype=np.uint8)
        if libc.mincore(self.start, self.size_bytes, pages.ctypes.data) != 0:
            return self.size_bytes
        return int((pages & 1).sum()) * mmap.PAGESIZE

    def _words(self) -> NDArray[np.uint64]:
        return _words(self.start, self.size_bytes)


def _blocks(first: int, last: int, end: int, kv_bytes: int) -> Iterator[KvRegion]:
    """malloc's blocks of about kv_bytes that start at a page of first .. last and stop before `end`."""
    heads = _words(first, last - first + mmap.PAGESIZE)[1 :: mmap.PAGESIZE // _WORD_BYTES]
    sizes = heads & ~np.uint64(7)
    fits = (
        (heads & np.uint64(7) == _IS_MMAPPED) & (sizes >= kv_bytes) & (sizes <= kv_bytes + _MAX_SLACK_BYTES)
    )
    for i in np.flatnonzero(fits):
        start, size = first + int(i) * mmap.PAGESIZE, int(sizes[i])
        if size % mmap.PAGESIZE == 0 and start + size <= end:
            # The first page has the header in it and stays.
            yield KvRegion(start + mmap.PAGESIZE, size - mmap.PAGESIZE)


def _words(start: int, size_bytes: int) -> NDArray[np.uint64]:
    """A view on memory of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint64 * (size_bytes // _WORD_BYTES)).from_address(start))


def _has_huge_pages_always() -> bool:
    try:
        return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
