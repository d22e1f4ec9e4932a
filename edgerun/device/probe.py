"""Putting the device report together.

Owns the order of reading and what is tried in child processes. Knows no file formats: those are in the
modules it calls.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import edgerun
from edgerun import paths
from edgerun.device import board, jetson
from edgerun.device.cgroup import CgroupLimits, read_limits
from edgerun.device.cpu import read_cpu
from edgerun.device.files import SystemFiles
from edgerun.device.jetson import JetsonFacts, read_jetson
from edgerun.device.memory import read_memory
from edgerun.device.nvidia import NvidiaFacts, read_nvidia
from edgerun.device.providers import CANDIDATES, TENSORRT, Evidence, blocker, choose
from edgerun.device.report import Accelerator, DeviceReport, MemoryInfo
from edgerun.device.smoke import (
    TIMEOUT_S,
    CheckId,
    ChildRunner,
    SmokeCheck,
    SmokeResult,
    fingerprint_folder,
    python_module,
    run_checks,
    run_children,
)
from edgerun.errors import NativeLibraryMissing
from edgerun.native.flavours import NativeFlavour
from edgerun.native.onnx_packages import ONNXRUNTIMES, clash

_TENSORRT_WHEELS = ("tensorrt-cu13-libs", "tensorrt-cu12-libs", "tensorrt-cu13", "tensorrt-cu12", "tensorrt")
# Its builder loads some gigabyte of kernels before the first engine; an estimate for the smallest boards.
TENSORRT_TIMEOUT_S = 60.0
_TEGRA_NODES = ("dev/nvhost-gpu", "dev/nvhost-ctrl-gpu", "dev/nvidia0", "dev/nvidiactl", "dev/nvgpu")


class FindFlavour(Protocol):
    """edgerun.native.flavours.find."""

    def __call__(
        self, provider: str, compute_capability: str | None = None, *, cuda_version: str | None = None
    ) -> NativeFlavour: ...


@dataclass(frozen=True, slots=True)
class ProbeTools:
    """What the probe reaches outside the files for; tests put fakes here."""

    run_children: ChildRunner
    find_flavour: FindFlavour
    package_versions: Callable[[], Mapping[str, str]]
    cache_path: Path

    @classmethod
    def real(cls) -> ProbeTools:
        from edgerun.native.flavours import find

        return cls(run_children, find, installed_packages, paths.cache_dir() / "providers.json")


def probe(
    sysroot: Path | None = None,
    *,
    smoke: bool = True,
    use_cache: bool = True,
    tools: ProbeTools | None = None,
) -> DeviceReport:
    """What this machine is and which provider each kind of model gets.

    sysroot: read the board files under this folder instead; then nothing of this machine counts and nothing
    is run. smoke=False: nothing is tried, the choice is what should work. use_cache=False: try again what
    worked before. Takes a second or two with trials, up to a minute when a driver hangs; blocks, so call it
    in a thread from asyncio. Never raises for what a machine holds.
    """
    files = SystemFiles(sysroot)
    report, gpu_blocker = read_device(files)
    if files.is_sysroot:
        note = f"read from {sysroot}: the providers are what this board should get, nothing was run"
        report = replace(report, notes=(*report.notes, note))
        return replace(report, providers=choose(Evidence(report, gpu_blocker)))
    return with_providers(report, gpu_blocker, tools or ProbeTools.real(), smoke=smoke, use_cache=use_cache)


def with_providers(
    report: DeviceReport, gpu_blocker: str | None, tools: ProbeTools, *, smoke: bool, use_cache: bool
) -> DeviceReport:
    """The report of this machine with its choices, after what is installed and what trials say."""
    packages = tools.package_versions()
    onnxruntimes = {name: packages[name] for name in ONNXRUNTIMES if name in packages}
    if report.accelerators and report.tensorrt is None:
        wheel = next((packages[name] for name in _TENSORRT_WHEELS if name in packages), None)
        report = replace(report, tensorrt=wheel)
    report = replace(report, notes=(*report.notes, *_package_notes(report, onnxruntimes)))
    evidence = Evidence(report, gpu_blocker, onnxruntimes, "llama-cpp-python" in packages)
    if smoke:
        evidence = replace(evidence, verdicts=_try_providers(evidence, packages, tools, use_cache=use_cache))
    return replace(report, providers=choose(evidence))


def read_device(files: SystemFiles) -> tuple[DeviceReport, str | None]:
    """The report without providers, and why no GPU can be used at all (None: nothing speaks against it)."""
    limits = read_limits(files)
    compatible = board.read_compatible(files)
    memory = read_memory(files, limits, is_unified=False)
    tegra = read_jetson(files, compatible, board.read_model(files), memory.total_bytes)
    nvidia = read_nvidia(files)
    accelerators = _accelerators(tegra, nvidia, memory)
    memory = replace(memory, unified=any(a.kind == "integrated" for a in accelerators))
    report = DeviceReport(
        board=tegra.board if tegra else board.read_board(files),
        soc=tegra.soc if tegra else board.read_soc(compatible),
        jetpack=tegra.jetpack if tegra else None,
        l4t=tegra.l4t if tegra else None,
        cuda=(jetson.read_cuda(files) if tegra else None) or nvidia.cuda,
        tensorrt=jetson.read_tensorrt(files) if accelerators else None,
        power_mode=tegra.power_mode if tegra else None,
        cpu=read_cpu(files, limits),
        memory=memory,
        accelerators=accelerators,
        notes=_notes(files, tegra, nvidia, limits, memory),
    )
    return report, _gpu_blocker(files, report, nvidia)


def installed_packages() -> dict[str, str]:
    """Versions of the distributions whose change may change what works."""
    names = (*ONNXRUNTIMES, *_TENSORRT_WHEELS, "llama-cpp-python", "numpy")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def llm_flavour(
    report: DeviceReport, provider: str, find_flavour: FindFlavour | None = None
) -> NativeFlavour:
    """The llama.cpp libraries that the probe tried for this provider, and that the engine must load then.

    Raises NativeLibraryMissing when there are none that fit.
    """
    find_flavour = find_flavour or ProbeTools.real().find_flavour
    if provider == "cpu":
        return find_flavour(provider)
    compute = report.accelerators[0].compute_capability if report.accelerators else None
    try:
        return find_flavour(provider, compute, cuda_version=report.cuda)
    except NativeLibraryMissing:
        # A card's driver also runs builds for an older CUDA; a Jetson has only the libraries of its JetPack.
        if report.is_tegra or report.cuda is None:
            raise
        return find_flavour(provider, compute)


def _accelerators(
    tegra: JetsonFacts | None, nvidia: NvidiaFacts, memory: MemoryInfo
) -> tuple[Accelerator, ...]:
    listed = [
        replace(gpu, memory_total_bytes=memory.total_bytes) if gpu.kind == "integrated" else gpu
        for gpu in nvidia.gpus
    ]
    if tegra is None:
        return tuple(listed)
    silicon = tegra.silicon
    from_smi = next((gpu for gpu in listed if gpu.kind == "integrated"), None)
    own = Accelerator(
        name=f"NVIDIA {silicon.family} ({silicon.gpu})" if silicon else f"NVIDIA {tegra.soc}",
        kind="integrated",
        compute_capability=silicon.compute_capability
        if silicon
        else (from_smi.compute_capability if from_smi else None),
        memory_total_bytes=memory.total_bytes,
        driver=nvidia.driver,
    )
    return (own, *(gpu for gpu in listed if gpu.kind == "discrete"))  # IGX boards have a card as well


def _gpu_blocker(files: SystemFiles, report: DeviceReport, nvidia: NvidiaFacts) -> str | None:
    if not report.accelerators:
        if nvidia.problem:
            return nvidia.problem
        if files.exists("dev/nvidiactl") or files.glob("dev/nvidia[0-9]*"):
            return "there are NVIDIA device nodes, but neither nvidia-smi nor the driver names a GPU"
        return "no NVIDIA GPU found"
    if not report.is_tegra:
        return None
    if not any(files.exists(node) for node in _TEGRA_NODES):
        return "the GPU's device nodes are missing: start the container with --runtime nvidia"
    if files.exists("dev/nvmap") and not files.is_accessible("dev/nvmap"):
        return "no permission on /dev/nvmap: add this user to the groups video and render, and log in again"
    if files.is_sysroot and not jetson.has_library(files, "libcuda.so*"):
        return "libcuda.so.1 was not found: the L4T driver libraries are not installed"
    return None


def _notes(
    files: SystemFiles,
    tegra: JetsonFacts | None,
    nvidia: NvidiaFacts,
    limits: CgroupLimits,
    memory: MemoryInfo,
) -> tuple[str, ...]:
    notes = list(tegra.notes) if tegra else []
    if nvidia.problem:
        notes.append(nvidia.problem)
    if board.is_container(files):
        notes.append("inside a container")
    if limits.cpu_cores is not None:
        notes.append(f"a cgroup limits this process to {limits.cpu_cores:g} CPU cores")
    if memory.limit_bytes is not None:
        notes.append(f"a cgroup limits this process to {memory.limit_bytes / 2**30:.1f} GiB of memory")
    if memory.total_bytes == 0:
        notes.append("/proc/meminfo cannot be read: memory is unknown")
    return tuple(notes)


def _package_notes(report: DeviceReport, onnxruntimes: Mapping[str, str]) -> list[str]:
    notes = []
    if len(onnxruntimes) > 1:
        notes.append(clash(onnxruntimes))
    if report.is_tegra and "onnxruntime-gpu" in onnxruntimes:
        notes.append(
            "onnxruntime-gpu is believed only after a trial: PyPI's build has no code for any Jetson GPU"
        )
    return notes


def _try_providers(
    evidence: Evidence, packages: Mapping[str, str], tools: ProbeTools, *, use_cache: bool
) -> dict[CheckId, SmokeResult]:
    report = evidence.report
    common = repr((edgerun.__version__, sys.version, sorted(packages.items()), report.accelerators))
    verdicts: dict[CheckId, SmokeResult] = {}
    checks: list[SmokeCheck] = []
    for kind, providers in CANDIDATES.items():
        for provider in providers:
            if blocker(kind, provider, evidence):
                continue
            if kind == "vision":
                argv = python_module("edgerun.device.ort_smoke", provider)
                timeout_s = TENSORRT_TIMEOUT_S if provider == TENSORRT else TIMEOUT_S
                checks.append(SmokeCheck(kind, provider, argv, f"{common}{report.tensorrt}", timeout_s))
                continue
            planned = _llm_check(provider, report, tools.find_flavour, common)
            if isinstance(planned, SmokeCheck):
                checks.append(planned)
            else:
                verdicts[kind, provider] = planned
    return verdicts | run_checks(checks, tools.run_children, tools.cache_path, use_cache=use_cache)


def _llm_check(
    provider: str, report: DeviceReport, find_flavour: FindFlavour, common: str
) -> SmokeCheck | SmokeResult:
    """The trial of llama.cpp on this provider, or at once its failure when there are no libraries for it."""
    try:
        flavour = llm_flavour(report, provider, find_flavour)
    except NativeLibraryMissing as error:
        return SmokeResult(False, error.message)
    argv = python_module(
        "edgerun.llm.selftest", "--lib-dir", str(flavour.path.resolve()), "--provider", provider
    )
    return SmokeCheck("llm", provider, argv, common + fingerprint_folder(flavour.path))
