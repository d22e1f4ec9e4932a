from __future__ import annotations

from pathlib import Path

from edgerun.device.cgroup import CgroupLimits
from edgerun.device.memory import read_memory
from tests.device.trees import FIXTURES, make_tree

MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\nBuffers: 5 kB\nCached: 700 kB\n"


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    text = (FIXTURES / "edge-cases/meminfo.page-cache-full").read_bytes()
    memory = read_memory(make_tree(tmp_path, {"proc/meminfo": text}), CgroupLimits(), is_unified=True)

    assert memory.available_bytes == 118_000_000 * 1024  # MemFree says 1.6 GB
    assert memory.total_bytes == 128_836_608 * 1024
    assert memory.unified


def test_cgroup_limit_bounds_what_is_available(tmp_path: Path) -> None:
    files = make_tree(tmp_path, {"proc/meminfo": MEMINFO})
    limits = CgroupLimits(memory_bytes=500 * 1024, memory_used_bytes=100 * 1024)
    memory = read_memory(files, limits, is_unified=False)

    assert memory.available_bytes == 400 * 1024
    assert memory.total_bytes == 1000 * 1024
    assert memory.limit_bytes == 500 * 1024


def test_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    files = make_tree(tmp_path, {"proc/meminfo": MEMINFO})
    memory = read_memory(files, CgroupLimits(memory_bytes=1 << 40), is_unified=False)

    assert memory.limit_bytes is None
    assert memory.available_bytes == 800 * 1024


def test_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = make_tree(tmp_path, {"proc/meminfo": MEMINFO})
    memory = read_memory(files, CgroupLimits(memory_bytes=1024, memory_used_bytes=2048), is_unified=False)

    assert memory.available_bytes == 0


def test_kernel_without_memavailable_adds_the_cache(tmp_path: Path) -> None:
    old = MEMINFO.replace("MemAvailable: 800 kB\n", "")
    memory = read_memory(make_tree(tmp_path, {"proc/meminfo": old}), CgroupLimits(), is_unified=False)

    assert memory.available_bytes == (10 + 5 + 700) * 1024
