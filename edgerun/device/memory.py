"""Main memory as this process may use it.

Read by MemAvailable: after reading large files MemFree is near nothing although the kernel would drop the
cached pages at once (cudaMemGetInfo reports MemFree on integrated GPUs and misleads there).
"""

from __future__ import annotations

import re

from edgerun.device.cgroup import CgroupLimits
from edgerun.device.files import SystemFiles
from edgerun.device.report import MemoryInfo

_ROW = re.compile(r"^(\w+):\s+(\d{1,15})\s*kB", re.MULTILINE)


def read_memory(files: SystemFiles, limits: CgroupLimits, *, is_unified: bool) -> MemoryInfo:
    """Zeros when /proc/meminfo cannot be read, which means that nothing may be loaded."""
    rows = {name: int(kib) * 1024 for name, kib in _ROW.findall(files.read_text("proc/meminfo") or "")}
    total = rows.get("MemTotal", 0)
    # Kernels before 3.14 have no MemAvailable; free plus page cache is its upper bound.
    fallback = rows.get("MemFree", 0) + rows.get("Buffers", 0) + rows.get("Cached", 0)
    available = min(rows.get("MemAvailable", fallback), total)
    limit = limits.memory_bytes if limits.memory_bytes is not None and limits.memory_bytes < total else None
    if limit is not None:
        available = min(available, max(0, limit - (limits.memory_used_bytes or 0)))
    return MemoryInfo(total_bytes=total, available_bytes=available, unified=is_unified, limit_bytes=limit)
