import pytest

from edgerun.llm.block_pool import BlockPool
from edgerun.llm.request import BlockId


def test_grow_takes_whole_blocks_only_when_needed() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    table: list[BlockId] = []
    assert pool.grow(table, 1)
    assert (len(table), pool.num_free) == (1, 3)
    assert pool.grow(table, 16)
    assert len(table) == 1
    assert pool.grow(table, 17)
    assert len(table) == 2


def test_grow_takes_nothing_when_it_cannot_take_all() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    table: list[BlockId] = []
    assert not pool.grow(table, 33)
    assert (table, pool.num_free) == ([], 2)


def test_released_blocks_are_free_again_and_taken_first() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    table: list[BlockId] = []
    pool.grow(table, 32)
    held = list(table)
    pool.release(table)
    assert (table, pool.num_free) == ([], 3)
    pool.grow(table, 32)
    assert table == held


def test_check_integrity_sees_a_lost_and_a_shared_block() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    table: list[BlockId] = []
    pool.grow(table, 20)
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="counted"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="two holders"):
        pool.check_integrity([table[:1], table[:1]])


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        BlockPool(blocks, size)
