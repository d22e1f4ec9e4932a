from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.device.cgroup import CgroupLimits
from edgerun.device.cpu import parse_cpu_list, parse_cpuinfo, read_cpu
from edgerun.device.files import SystemFiles
from tests.device.trees import FIXTURES, make_tree


@pytest.mark.parametrize(
    ("board", "model", "physical", "logical", "architecture"),
    [
        ("desktop-rtx4090", "AMD Ryzen 9 7950X 16-Core Processor", 16, 32, "x86_64"),
        ("laptop-cpu", "11th Gen Intel(R) Core(TM) i5-1135G7 @ 2.40GHz", 4, 8, "x86_64"),
        ("orin-nano-8gb-jp62", "Cortex-A78AE", 6, 6, "aarch64"),
        ("orin-nano-8gb-jp511", "Cortex-A78AE", 6, 6, "aarch64"),  # its model name is "ARMv8 Processor"
        ("xavier-nx-jp511", "NVIDIA Carmel", 6, 6, "aarch64"),
        ("agx-thor-jp72", "Neoverse-V3AE", 14, 14, "aarch64"),
        ("rpi5-8gb", "Cortex-A76", 4, 4, "aarch64"),
    ],
)
def test_boards_cpu(board: str, model: str, physical: int, logical: int, architecture: str) -> None:
    cpu = read_cpu(SystemFiles(FIXTURES / board), CgroupLimits())

    assert (cpu.model, cpu.cores_physical, cpu.cores_logical) == (model, physical, logical)
    assert cpu.architecture == architecture
    assert cpu.cores_usable == physical


def test_simd_flags_are_those_the_kernels_choose_by() -> None:
    laptop = read_cpu(SystemFiles(FIXTURES / "laptop-cpu"), CgroupLimits())
    thor = read_cpu(SystemFiles(FIXTURES / "agx-thor-jp72"), CgroupLimits())

    assert "avx2" in laptop.simd and "avx512_vnni" in laptop.simd
    assert "sve2" in thor.simd and "i8mm" in thor.simd
    assert "fpu" not in laptop.simd


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = make_tree(
        tmp_path,
        {
            "proc/cpuinfo": "".join(f"processor: {n}\n\n" for n in range(4)),
            **{topology.format(n): pair for n, pair in enumerate(["0,2", "1,3", "0,2", "1,3"])},
        },
    )
    cpu = read_cpu(files, CgroupLimits())

    assert (cpu.cores_physical, cpu.cores_logical) == (2, 4)


def test_two_sockets_are_told_apart(tmp_path: Path) -> None:
    text = "".join(
        f"processor: {n}\nphysical id: {n // 2}\ncore id: {n % 2}\ncpu cores: 2\n\n" for n in range(4)
    )

    assert read_cpu(make_tree(tmp_path, {"proc/cpuinfo": text}), CgroupLimits()).cores_physical == 4


@pytest.mark.parametrize(("limit", "usable"), [(1.5, 1), (2.0, 2), (0.25, 1), (64.0, 4), (None, 4)])
def test_cgroup_quota_bounds_the_usable_cores(limit: float | None, usable: int) -> None:
    cpu = read_cpu(SystemFiles(FIXTURES / "laptop-cpu"), CgroupLimits(cpu_cores=limit))

    assert cpu.cores_usable == usable
    assert cpu.limit_cores == limit


def test_unreadable_cpuinfo_is_one_core(tmp_path: Path) -> None:
    cpu = read_cpu(make_tree(tmp_path, {"proc/cpuinfo": bytes(range(256))}), CgroupLimits())

    assert (cpu.model, cpu.cores_physical, cpu.cores_usable, cpu.simd) == (None, 1, 1, ())


def test_lines_after_the_last_processor_do_not_overwrite_it() -> None:
    processors = parse_cpuinfo("Hardware: first\nprocessor: 0\nmodel name: A\n\nModel: Raspberry Pi\n")

    assert len(processors) == 1
    assert processors[0]["model name"] == "A"


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,5", {0, 1, 2, 5}), ("7\n", {7}), ("", set()), ("x", set()), ("3-1", set())]
)
def test_parse_cpu_list(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus
