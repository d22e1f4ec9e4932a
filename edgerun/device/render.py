"""The device report as text for people; `edgerun probe` prints it."""

from __future__ import annotations

from edgerun.device.report import Accelerator, DeviceReport, ProviderChoice
from edgerun.device.telemetry import DeviceLoad

_TITLES = {"llm": "Language models", "vision": "Vision models"}


def render(report: DeviceReport, load: DeviceLoad | None = None) -> str:
    """Several short lines, without a newline at the end; what is unknown is left out."""
    rows = [
        ("Board", _joined(report.board, report.soc)),
        ("Software", _software(report)),
        ("CPU", _cpu(report)),
        ("Memory", _memory(report)),
        *(("GPU", _gpu(gpu)) for gpu in report.accelerators),
        ("Power mode", report.power_mode or ""),
        ("Now", _load(load) if load else ""),
    ]
    if not report.accelerators:
        rows.insert(4, ("GPU", "none that edgerun can use"))
    width = max(len(title) for title, _ in rows) + 2
    lines = [f"{title:<{width}}{text}" for title, text in rows if text]
    for kind in ("llm", "vision"):
        lines += ["", _TITLES[kind], *_providers(report.choices(kind))]
    if report.notes:
        lines += ["", "Notes", *(f"  - {note}" for note in report.notes)]
    return "\n".join(lines)


def _providers(choices: tuple[ProviderChoice, ...]) -> list[str]:
    width = max((len(c.provider) for c in choices), default=0) + 2
    lines = [f"  {'✓' if c.chosen else '·'} {c.provider:<{width}}{c.reason}" for c in choices]
    if not any(c.chosen for c in choices):
        lines.append("  ! none can be used: see the reasons above")
    return lines


def _joined(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _software(report: DeviceReport) -> str:
    return _joined(
        report.jetpack and f"JetPack {report.jetpack}",
        report.l4t and f"L4T {report.l4t}",
        report.cuda and f"CUDA {report.cuda}",
        report.tensorrt and f"TensorRT {report.tensorrt}",
    )


def _cpu(report: DeviceReport) -> str:
    cpu = report.cpu
    cores = f"{cpu.cores_physical} cores"
    if cpu.cores_logical != cpu.cores_physical:
        cores += f" / {cpu.cores_logical} threads"
    if cpu.cores_usable < cpu.cores_physical:
        cores += f" ({cpu.cores_usable} usable)"
    return _joined(cpu.model or cpu.architecture, cores, " ".join(cpu.simd))


def _memory(report: DeviceReport) -> str:
    memory = report.memory
    shared = ", shared with the GPU" if memory.unified else ""
    return f"{_gib(memory.available_bytes)} free of {_gib(memory.total_bytes)}{shared}"


def _gpu(gpu: Accelerator) -> str:
    memory = gpu.memory_total_bytes if gpu.kind == "discrete" else None
    return _joined(
        gpu.name,
        gpu.compute_capability and f"compute capability {gpu.compute_capability}",
        None if memory is None else _gib(memory),
        gpu.driver and f"driver {gpu.driver}",
    )


def _load(load: DeviceLoad) -> str:
    return _joined(
        None if load.cpu_percent is None else f"CPU {load.cpu_percent:.0f} %",
        None if load.gpu_percent is None else f"GPU {load.gpu_percent:.0f} %",
        None if load.temperature_c is None else f"{load.temperature_c:.0f} °C",
        None if load.power_w is None else f"{load.power_w:.1f} W",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
