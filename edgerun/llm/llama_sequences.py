"""What a llama.cpp context holds for each sequence: share it, cut it, save it, put it back.

Two layouts. Unified: one pool of cells for all sequences; a copy shares cells by tag and costs nothing.
Streams: a pool of its own for each sequence; a copy moves bytes. Does not know blocks, requests or when to do
what.

llama.cpp ends the process over a sequence id that it does not have and over a partial copy between streams:
the first is checked here, in Python, the second is never asked for.

A model with a sliding window forgets what no later token can see: when another sequence needs the cells, and
whenever a sequence is saved (what is loaded again goes on correctly, but cannot be cut). llama.cpp keeps the
positions from the first to the last complete, so position_range tells whether the beginning is still there.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

SavedCells = NDArray[np.uint8]  # len() is its size in bytes


class LlamaSequences:
    """The part of a LlamaContext that is about sequences. Only the context's owner's thread may call it.

    Ids are 0 .. num_seq_ids - 1; any other raises ValueError.
    """

    def __init__(self, api: Any, handle: Any, *, num_seq_ids: int, unified: bool) -> None:
        self._api, self.handle = api, handle
        self._memory = api.llama_get_memory(handle)
        self._num_seq_ids, self._is_unified = num_seq_ids, unified
        self._scratch: SavedCells = np.empty(0, dtype=np.uint8)
        self._in_scratch: tuple[int, int] | None = (
            None  # whose cells it holds as they are now, and their size
        )

    def position_range(self, seq_id: int) -> tuple[int, int]:
        """First and last position that is held for a sequence; (-1, -1) when none."""
        self._check(seq_id)
        api, memory = self._api, self._memory
        return (
            int(api.llama_memory_seq_pos_min(memory, seq_id)),
            int(api.llama_memory_seq_pos_max(memory, seq_id)),
        )

    def remove_sequence(self, seq_id: int, start: int = 0) -> bool:
        """Free the cells from position `start` on. False: this kind of memory cannot be cut there, and
        nothing was done; a whole sequence can always be removed."""
        self._check(seq_id)
        self._forget_scratch(seq_id)
        return bool(self._api.llama_memory_seq_rm(self._memory, seq_id, start, -1))

    def copy_sequence(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first num_tokens positions of `source`, and nothing else.

        Unified: the cells are shared. Streams: all of the source is copied and cut, which is cheaper than
        llama.cpp's own copy of the whole stream; several copies from one source read it once.
        """
        self._check(source, target)
        if source == target:
            raise ValueError(f"sequence {source} cannot be copied to itself")
        self._forget_scratch(target)
        if self._is_unified:
            self._api.llama_memory_seq_rm(self._memory, target, -1, -1)
            self._api.llama_memory_seq_cp(self._memory, source, target, 0, num_tokens)
            return
        size = self._read_into_scratch(source)
        if self._write(target, self._scratch[:size]):
            self._api.llama_memory_seq_rm(self._memory, target, num_tokens, -1)

    def save_sequence(self, seq_id: int) -> SavedCells:
        """All that is held for a sequence, which stays as it is."""
        self._check(seq_id)
        saved = np.empty(self._api.llama_state_seq_get_size(self.handle, seq_id), dtype=np.uint8)
        return saved[: self._read(seq_id, saved)]

    def load_sequence(self, seq_id: int, saved: SavedCells) -> bool:
        """Replace what a sequence holds. False: there was no room, and the sequence is empty now."""
        self._check(seq_id)
        self._forget_scratch(seq_id)
        return self._write(seq_id, saved)

    def save_tail(self, seq_id: int, start: int, spare_id: int) -> SavedCells:
        """What a sequence holds from position `start` on; in streams all of it: nothing is shared there.

        spare_id: an empty id, and empty again afterwards. To be put back with load_tail. Not for a sliding
        window: what it leaves out of the tail would be a hole that position_range does not show.
        """
        if not self._is_unified or start == 0:
            return self.save_sequence(seq_id)
        self._check(seq_id, spare_id)
        self._api.llama_memory_seq_cp(self._memory, seq_id, spare_id, start, -1)
        saved = self.save_sequence(spare_id)
        self.remove_sequence(spare_id)
        return saved

    def load_tail(self, seq_id: int, saved: SavedCells, spare_id: int) -> bool:
        """Put a saved tail behind what a sequence holds; in streams it replaces that. False: no room."""
        if not self._is_unified or self.position_range(seq_id) == (-1, -1):
            return self.load_sequence(seq_id, saved)
        self._check(seq_id, spare_id)
        # llama.cpp empties the sequence that it loads into.
        if not self.load_sequence(spare_id, saved):
            return False
        self._api.llama_memory_seq_cp(self._memory, spare_id, seq_id, -1, -1)
        return self.remove_sequence(spare_id)

    def exchange_sequences(self, first: int, second: int) -> None:
        """Two sequences change ids. Streams alone: in a shared pool ids need no order."""
        if self._is_unified:
            raise ValueError("sequences are exchanged in streams only")
        size = self._read_into_scratch(first)
        saved = self.save_sequence(second)
        was_written = self._write(second, self._scratch[:size]) and self._write(first, saved)
        self._in_scratch = None
        assert was_written, "a stream has no room for what another stream of its size held"

    def _check(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            if not 0 <= seq_id < self._num_seq_ids:
                raise ValueError(f"sequence id {seq_id} is not in 0 .. {self._num_seq_ids - 1}")

    def _forget_scratch(self, changed: int) -> None:
        if self._in_scratch is not None and self._in_scratch[0] == changed:
            self._in_scratch = None

    def _read_into_scratch(self, seq_id: int) -> int:
        """The size of what a sequence holds, which is at the front of the buffer then."""
        self._check(seq_id)
        if self._in_scratch is not None and self._in_scratch[0] == seq_id:
            return self._in_scratch[1]
        size = int(self._api.llama_state_seq_get_size(self.handle, seq_id))
        if size > len(self._scratch):
            self._scratch = np.empty(size, dtype=np.uint8)
        size = self._read(seq_id, self._scratch)
        self._in_scratch = (seq_id, size)
        return size

    def _read(self, seq_id: int, buffer: SavedCells) -> int:
        size = int(self._api.llama_state_seq_get_data(self.handle, _bytes_of(buffer), len(buffer), seq_id))
        if size == 0:
            raise RuntimeError(f"llama.cpp could not save sequence {seq_id}")
        return size

    def _write(self, seq_id: int, saved: SavedCells) -> bool:
        # llama.cpp does so itself, but not when nothing was saved.
        self._api.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
        return bool(self._api.llama_state_seq_set_data(self.handle, _bytes_of(saved), len(saved), seq_id))


def _bytes_of(buffer: SavedCells) -> Any:
    return ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
