"""What is known about this machine: frozen types, and their JSON form.

Owns names and units. Does not know where the values come from (probe.py) nor how a provider is chosen
(providers.py). None means: unknowable here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgerun.repository.spec import ModelKind

AcceleratorKind = Literal["integrated", "discrete"]
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

CPU_PROVIDERS: dict[ModelKind, str] = {"llm": "cpu", "vision": "CPUExecutionProvider"}


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The processor, and how much of it this process may use."""

    model: str | None
    architecture: str | None  # as uname -m
    cores_physical: int
    cores_logical: int
    cores_usable: int  # physical cores after affinity and cgroup limit; at least 1
    limit_cores: float | None  # cgroup CPU quota in cores; None: no limit
    simd: tuple[str, ...]  # the kernel's flag names, only those that matter for inference

    def to_json(self) -> dict[str, Json]:
        return {
            "model": self.model,
            "architecture": self.architecture,
            "cores_physical": self.cores_physical,
            "cores_logical": self.cores_logical,
            "cores_usable": self.cores_usable,
            "limit_cores": self.limit_cores,
            "simd": list(self.simd),
        }


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Main memory. On a unified board the GPU uses the same bytes: never add the two."""

    total_bytes: int
    available_bytes: int  # MemAvailable, and not more than a cgroup limit leaves
    unified: bool
    limit_bytes: int | None = None  # cgroup memory limit; None: no limit

    def to_json(self) -> dict[str, Json]:
        return {
            "total_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
            "unified": self.unified,
        }


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One NVIDIA GPU. For an integrated one, memory_total_bytes is the shared main memory."""

    name: str
    kind: AcceleratorKind
    compute_capability: str | None
    memory_total_bytes: int | None
    driver: str | None

    def to_json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "kind": self.kind,
            "compute_capability": self.compute_capability,
            "memory_total_bytes": self.memory_total_bytes,
            "driver": self.driver,
        }


@dataclass(frozen=True, slots=True)
class ProviderChoice:
    """One execution provider for one model kind, chosen or not, and why.

    is_usable: it works here, though another may have been chosen. A chosen one is always usable.
    """

    kind: ModelKind
    provider: str
    chosen: bool
    reason: str
    is_usable: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.provider != CPU_PROVIDERS[self.kind]

    def to_json(self) -> dict[str, Json]:
        return {
            "kind": self.kind,
            "provider": self.provider,
            "chosen": self.chosen,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The probe's answer.

    cuda: on a Jetson the toolkit on the disk, with a discrete card the newest CUDA its driver runs.
    providers: in order of preference within each kind; at most one is chosen for a kind.
    """

    board: str | None
    soc: str | None
    jetpack: str | None
    l4t: str | None
    cuda: str | None
    tensorrt: str | None
    power_mode: str | None
    cpu: CpuInfo
    memory: MemoryInfo
    accelerators: tuple[Accelerator, ...] = ()
    providers: tuple[ProviderChoice, ...] = ()
    notes: tuple[str, ...] = ()

    def chosen(self, kind: ModelKind) -> ProviderChoice | None:
        return next((c for c in self.providers if c.kind == kind and c.chosen), None)

    def choices(self, kind: ModelKind) -> tuple[ProviderChoice, ...]:
        return tuple(c for c in self.providers if c.kind == kind)

    @property
    def is_tegra(self) -> bool:
        return (self.soc or "").startswith("tegra")

    def to_json(self) -> dict[str, Json]:
        """The `edgerun probe --json` document."""
        return {
            "board": self.board,
            "soc": self.soc,
            "jetpack": self.jetpack,
            "l4t": self.l4t,
            "cuda": self.cuda,
            "tensorrt": self.tensorrt,
            "power_mode": self.power_mode,
            "cpu": self.cpu.to_json(),
            "memory": self.memory.to_json(),
            "accelerators": [a.to_json() for a in self.accelerators],
            "providers": [c.to_json() for c in self.providers],
            "notes": list(self.notes),
        }
