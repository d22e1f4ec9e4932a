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


def test_a_shared_block_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    first: list[BlockId] = []
    pool.grow(first, 40)
    second = pool.share(first[:2])
    pool.release(first)
    assert (second, pool.num_free) == (second, 2)
    pool.check_integrity([second])
    pool.release(second)
    assert pool.num_free == 4


def test_blocks_that_only_parked_tables_hold_are_available() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    parked: list[BlockId] = []
    pool.grow(parked, 48)
    assert (pool.num_free, pool.num_available) == (1, 1)
    pool.park(parked)
    assert (pool.num_free, pool.num_available) == (1, 4)
    running = pool.share(parked[:1])
    assert pool.num_available == 3
    pool.check_integrity([running], [parked])
    pool.release(parked, 1, parked=True)
    assert (pool.num_free, pool.num_available) == (3, 3)
    pool.unpark(parked)
    pool.check_integrity([running, parked])


def test_check_integrity_sees_a_lost_and_a_miscounted_block() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    table: list[BlockId] = []
    pool.grow(table, 20)
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_integrity([table, table[:1]])


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        BlockPool(blocks, size)
