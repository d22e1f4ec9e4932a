from __future__ import annotations

from edgerun.llm.loader import physical_cores, usable_bytes

GIB = 2**30


def test_a_tenth_and_at_most_a_gigabyte_is_left_to_the_system() -> None:
    assert usable_bytes(3 * GIB, 4 * GIB) == 3 * GIB - 4 * GIB // 10
    assert usable_bytes(20 * GIB, 24 * GIB) == 19 * GIB
    assert usable_bytes(GIB // 10, 8 * GIB) == 0


def test_there_is_at_least_one_core() -> None:
    assert physical_cores() >= 1
