"""KV blocks: who holds which part of the pool. Pure accounting; llama.cpp picks the cells itself.

A block stands for `block_size` cells of llama.cpp's unified pool. Any free cells will do there, so a pool of
num_blocks * block_size cells can always take what this class has granted.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgerun.llm.request import BlockId


class BlockPool:
    """Free and held blocks. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens cannot hold anything")
        self.num_blocks, self.block_size = num_blocks, block_size
        # A stack: the block freed last is taken first, so that low block numbers stay in use.
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, table: list[BlockId], num_tokens: int) -> bool:
        """Extend table until it covers num_tokens; False, with nothing taken, when too few are free."""
        needed = self.blocks_for(num_tokens) - len(table)
        if needed > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(needed))
        return True

    def release(self, table: list[BlockId]) -> None:
        """Give all blocks of a table back and empty it."""
        self._free.extend(reversed(table))
        table.clear()

    def check_integrity(self, tables: Iterable[list[BlockId]]) -> None:
        """Every block is free or in exactly one table; AssertionError otherwise."""
        seen = [*self._free, *(block for table in tables for block in table)]
        assert len(seen) == self.num_blocks, f"{len(seen)} blocks counted, {self.num_blocks} exist"
        assert len(set(seen)) == len(seen), "a block has two holders"
