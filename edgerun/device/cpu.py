"""The processor: model, cores, vector instructions, and how many cores this process may use."""

from __future__ import annotations

import os
import platform
import re

from edgerun.device.cgroup import CgroupLimits
from edgerun.device.files import SystemFiles, to_int
from edgerun.device.report import CpuInfo

# (implementer, part) -> core, from Arm's and NVIDIA's MIDR values; Thor's is unverified on hardware.
_ARM_CORES = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd83"): "Neoverse-V3AE",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x4e", "0x004"): "NVIDIA Carmel",
}

# What llama.cpp's and ONNX Runtime's CPU kernels choose their code by.
_SIMD = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "sme"),
)

_CPU_DIR = "sys/devices/system/cpu"


def read_cpu(files: SystemFiles, limits: CgroupLimits) -> CpuInfo:
    processors = parse_cpuinfo(files.read_text("proc/cpuinfo") or "")
    siblings = _sibling_groups(files)
    logical = len(processors) or sum(len(g) for g in siblings) or 1
    physical = len(siblings) or _physical_from_cpuinfo(processors) or logical
    first = processors[0] if processors else {}
    flags = set((first.get("flags") or first.get("Features") or "").split())
    return CpuInfo(
        model=_model(first),
        architecture=_architecture(files),
        cores_physical=physical,
        cores_logical=logical,
        cores_usable=_usable(files, siblings, physical, limits.cpu_cores),
        limit_cores=limits.cpu_cores,
        simd=tuple(name for name in _SIMD if name in flags),
    )


def parse_cpuinfo(text: str) -> list[dict[str, str]]:
    """One mapping for each logical processor, in order; text after the last one (Raspberry Pi) is dropped."""
    processors: list[dict[str, str]] = []
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        name = name.strip()
        if not colon:
            continue
        if name == "processor":
            processors.append({})
        if processors:
            processors[-1].setdefault(name, value.strip())
    return processors


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list form: "0-3,8" -> {0, 1, 2, 3, 8}; anything unreadable in it is left out."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d{1,5})(?:-(\d{1,5}))?", text):
        low, high = int(first), int(last or first)
        found.update(range(low, min(high, low + 4095) + 1))
    return frozenset(found)


def _model(processor: dict[str, str]) -> str | None:
    # Arm's "model name" says only "ARMv8 Processor", so the part number comes first.
    core = _ARM_CORES.get((processor.get("CPU implementer", ""), processor.get("CPU part", "").lower()))
    return core or processor.get("model name") or None


def _architecture(files: SystemFiles) -> str | None:
    if not files.is_sysroot:
        return platform.machine() or None
    recorded = files.run(["uname", "-m"])
    return (recorded.text.strip() or None) if recorded else None


def _sibling_groups(files: SystemFiles) -> frozenset[frozenset[int]]:
    """The hardware threads of each physical core that is online."""
    paths = files.glob(f"{_CPU_DIR}/cpu[0-9]*/topology/thread_siblings_list")
    groups = (parse_cpu_list(files.read_text(path) or "") for path in paths)
    return frozenset(group for group in groups if group)


def _physical_from_cpuinfo(processors: list[dict[str, str]]) -> int:
    """0 when cpuinfo does not say."""
    cores = {(p["physical id"], p["core id"]) for p in processors if "physical id" in p and "core id" in p}
    if cores:
        return len(cores)
    sockets = {p.get("physical id", "0") for p in processors}
    per_socket = to_int(processors[0].get("cpu cores")) if processors else None
    return (per_socket or 0) * len(sockets)


def _usable(
    files: SystemFiles, siblings: frozenset[frozenset[int]], physical: int, limit: float | None
) -> int:
    usable = physical
    if not files.is_sysroot:
        allowed = os.sched_getaffinity(0)
        usable = sum(1 for group in siblings if group & allowed) or min(physical, len(allowed))
    if limit is not None:
        # More threads than the quota are stopped together at its end, so round down.
        usable = min(usable, int(limit))
    return max(1, usable)
