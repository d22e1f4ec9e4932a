"""The CPU and memory limits that a container or a service manager put on this process.

Reads cgroup v2 and v1. A limit anywhere between this process's group and the root holds, so the smallest
one counts. Under Docker the group's own path may not be mounted: then only the root is seen, and that is
the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from edgerun.device.files import SystemFiles, to_int

_BASE = "sys/fs/cgroup"
_MOUNTS = {  # v2's single tree, then where distributions mount v1's controllers
    "cpu": (_BASE, f"{_BASE}/cpu", f"{_BASE}/cpu,cpuacct"),
    "memory": (_BASE, f"{_BASE}/memory"),
}
# cgroup v1 writes "no limit" as the largest page-aligned int64, about 9.2e18.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """None: no limit. memory_used_bytes leaves out file pages that the kernel can drop."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None


def read_limits(files: SystemFiles) -> CgroupLimits:
    groups = _groups(files)
    cpu = [c for path in _folders(files, groups, "cpu") if (c := _cpu_cores(files, path)) is not None]
    memory = [
        (limit, path)
        for path in _folders(files, groups, "memory")
        if (limit := _memory_limit(files, path)) is not None
    ]
    tightest = min(memory, default=None)
    return CgroupLimits(
        cpu_cores=min(cpu, default=None),
        memory_bytes=tightest[0] if tightest else None,
        memory_used_bytes=_memory_used(files, tightest[1]) if tightest else None,
    )


def _groups(files: SystemFiles) -> dict[str, str]:
    """Controller name -> group path; "" is v2's single tree."""
    groups: dict[str, str] = {}
    for line in (files.read_text("proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                groups[controller] = fields[2]
    return groups


def _folders(files: SystemFiles, groups: dict[str, str], controller: str) -> Iterator[str]:
    """Folders from the process's own group up to the root of the tree that has this controller."""
    group = groups.get(controller, groups.get("", "/"))
    chain = [group, *(str(parent) for parent in PurePosixPath(group).parents)]
    for mount in _MOUNTS[controller]:
        if not files.exists(mount):
            continue
        for step in dict.fromkeys(chain):
            yield f"{mount}/{step.strip('/')}".rstrip("/")


def _cpu_cores(files: SystemFiles, folder: str) -> float | None:
    v2 = (files.read_text(f"{folder}/cpu.max") or "").split()  # "max 100000" or "150000 100000"
    if len(v2) == 2:
        quota, period = to_int(v2[0]), to_int(v2[1])
    else:
        quota = files.read_int(f"{folder}/cpu.cfs_quota_us")  # -1: no limit
        period = files.read_int(f"{folder}/cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 and period > 0 else None


def _memory_limit(files: SystemFiles, folder: str) -> int | None:
    limit = files.read_int(f"{folder}/memory.max")  # v2 writes "max" for none, which is no int
    if limit is None:
        limit = files.read_int(f"{folder}/memory.limit_in_bytes")
    return limit if limit is not None and 0 < limit < _NO_LIMIT_BYTES else None


def _memory_used(files: SystemFiles, folder: str) -> int | None:
    used = files.read_int(f"{folder}/memory.current")
    if used is None:
        used = files.read_int(f"{folder}/memory.usage_in_bytes")
    if used is None:
        return None
    for line in (files.read_text(f"{folder}/memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return max(0, used - (to_int(value) or 0))
    return used
