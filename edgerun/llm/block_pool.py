"""KV blocks: how many sequences hold each one. Pure accounting; llama.cpp picks the cells itself.

A block stands for `block_size` cells. In the unified layout several block tables may hold one block: its
cells carry several sequence ids. A pool of num_blocks * block_size cells can take all that was granted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from edgerun.llm.request import BlockId


class BlockPool:
    """Reference counts and the free list. Not thread-safe: the engine thread owns it.

    A block is free, or held by at least one table. Of its holders some may be parked: ended sequences that
    are kept for whoever asks the same, and that give way when room is needed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens cannot hold anything")
        self.num_blocks, self.block_size = num_blocks, block_size
        # A stack: the block freed last is taken first, so that low block numbers stay in use.
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._num_holders = [0] * num_blocks
        self._num_parked = [0] * num_blocks  # how many of the holders are parked
        self._num_reclaimable = 0  # blocks that only parked tables hold

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free now, or once every parked table has given way."""
        return len(self._free) + self._num_reclaimable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_holders(self, block: BlockId) -> int:
        return self._num_holders[block]

    def grow(self, table: list[BlockId], num_tokens: int) -> bool:
        """Extend a running table until it covers num_tokens; False, with nothing taken, when too few are
        free."""
        needed = self.blocks_for(num_tokens) - len(table)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            block = self._free.pop()
            self._num_holders[block] = 1
            table.append(block)
        return True

    def share(self, blocks: list[BlockId]) -> list[BlockId]:
        """A running table that holds the same blocks."""
        for block in blocks:
            self._change(block, 1, 0)
        return list(blocks)

    def release(self, table: list[BlockId], keep: int = 0, *, parked: bool = False) -> None:
        """Give back all blocks of a running (or parked) table but the first `keep`."""
        for block in reversed(table[keep:]):
            self._change(block, -1, -1 if parked else 0)
        del table[keep:]

    def park(self, table: list[BlockId]) -> None:
        """From running to parked."""
        for block in table:
            self._change(block, 0, 1)

    def unpark(self, table: list[BlockId]) -> None:
        """From parked to running."""
        for block in table:
            self._change(block, 0, -1)

    def _change(self, block: BlockId, holders: int, parked: int) -> None:
        was = 0 < self._num_holders[block] == self._num_parked[block]
        self._num_holders[block] += holders
        self._num_parked[block] += parked
        now = 0 < self._num_holders[block] == self._num_parked[block]
        self._num_reclaimable += now - was
        if self._num_holders[block] == 0:
            self._free.append(block)

    def check_integrity(self, running: Iterable[list[BlockId]], parked: Iterable[list[BlockId]] = ()) -> None:
        """Every block is free or held by as many tables as counted; AssertionError otherwise."""
        parked_tables = list(parked)
        held_parked = Counter(block for table in parked_tables for block in table)
        held = Counter(block for table in running for block in table) + held_parked
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(held[block] for block in self._free), "a free block has a holder"
        assert len(held) + len(self._free) == self.num_blocks, "a block is lost"
        for block, count in held.items():
            assert self._num_holders[block] == count, "a block's holders are miscounted"
            assert self._num_parked[block] == held_parked[block], "a block's parked holders are miscounted"
        reclaimable = sum(1 for block, count in held.items() if count == held_parked[block])
        assert reclaimable == self._num_reclaimable, "the reclaimable blocks are miscounted"
