from __future__ import annotations

from pathlib import Path

from edgerun.device.cgroup import CgroupLimits, read_limits
from tests.device.trees import make_tree

BASE = "sys/fs/cgroup"


def test_no_cgroup_means_no_limit(tmp_path: Path) -> None:
    assert read_limits(make_tree(tmp_path, {})) == CgroupLimits()


def test_v2_limits_of_a_container(tmp_path: Path) -> None:
    files = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            f"{BASE}/cpu.max": "150000 100000\n",
            f"{BASE}/memory.max": "4294967296\n",
            f"{BASE}/memory.current": "3000\n",
            f"{BASE}/memory.stat": "anon 1000\ninactive_file 800\n",
        },
    )

    assert read_limits(files) == CgroupLimits(1.5, 4 << 30, 2200)


def test_v2_max_is_no_limit(tmp_path: Path) -> None:
    files = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            f"{BASE}/cpu.max": "max 100000\n",
            f"{BASE}/memory.max": "max\n",
        },
    )

    assert read_limits(files) == CgroupLimits()


def test_v2_tightest_limit_above_the_group_counts(tmp_path: Path) -> None:
    files = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/edgerun.service\n",
            f"{BASE}/system.slice/cpu.max": "200000 100000",
            f"{BASE}/system.slice/memory.max": "1000",
            f"{BASE}/system.slice/memory.current": "100",
            f"{BASE}/system.slice/edgerun.service/cpu.max": "400000 100000",
            f"{BASE}/system.slice/edgerun.service/memory.max": "2000",
            f"{BASE}/system.slice/edgerun.service/memory.current": "50",
        },
    )

    assert read_limits(files) == CgroupLimits(2.0, 1000, 100)


def test_v1_limits_where_the_group_path_is_not_mounted(tmp_path: Path) -> None:
    files = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/ignored\n",
            f"{BASE}/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            f"{BASE}/cpu,cpuacct/cpu.cfs_period_us": "100000",
            f"{BASE}/memory/memory.limit_in_bytes": "2147483648",
            f"{BASE}/memory/memory.usage_in_bytes": "4096",
            f"{BASE}/memory/memory.stat": "total_inactive_file 96\n",
        },
    )

    assert read_limits(files) == CgroupLimits(0.5, 2 << 30, 4000)


def test_v1_unlimited_values_are_no_limit(tmp_path: Path) -> None:
    files = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/\n",
            f"{BASE}/cpu/cpu.cfs_quota_us": "-1",
            f"{BASE}/cpu/cpu.cfs_period_us": "100000",
            f"{BASE}/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )

    assert read_limits(files) == CgroupLimits()
