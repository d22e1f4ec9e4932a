"""What nvidia-smi and the driver say about NVIDIA GPUs.

Every field may be a number, "[N/A]", "Not Supported" or "ERR!", so none is converted blindly. JetPack 5 has
no nvidia-smi, JetPack 6 answers N/A to everything, WSL2 keeps it in /usr/lib/wsl/lib.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgerun.device.files import CommandOutput, SystemFiles
from edgerun.device.report import Accelerator, AcceleratorKind

QUERY_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "utilization.gpu", "compute_cap")
# Drivers before about 510 do not know compute_cap and refuse the whole query.
_OLD_DRIVER_FIELDS = QUERY_FIELDS[:-1]

# "CUDA UMD Version" is how newer releases of the tool label the same number.
_CUDA = re.compile(r"CUDA (?:UMD )?Version\s*:\s*([\w.!]+)")
_DRIVER = re.compile(r"Driver Version\s*:\s*(\d+(?:\.\d+)+)")
_PROC_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_COMPUTE = re.compile(r"\d+\.\d+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# GPUs that share main memory, by the name nvidia-smi gives: Jetson's, and GB10 (DGX Spark).
_INTEGRATED = re.compile(r"\b(Orin|Thor|Xavier|GB10|nvgpu)\b")


@dataclass(frozen=True, slots=True)
class NvidiaFacts:
    """cuda: the newest CUDA the driver runs. problem: why there may be a GPU that nobody can use."""

    gpus: tuple[Accelerator, ...] = ()
    cuda: str | None = None
    driver: str | None = None
    problem: str | None = None


def read_nvidia(files: SystemFiles) -> NvidiaFacts:
    """GPUs in nvidia-smi's order. Takes up to seconds on a real machine with a sleeping driver."""
    table = files.run(["nvidia-smi"])
    header = table.text if table else ""
    cuda, driver = _CUDA.search(header), _DRIVER.search(header)
    problem = None
    if table and not table.is_ok:
        problem = f"nvidia-smi failed: {_first_line(header)}"
    elif cuda and not _COMPUTE.fullmatch(cuda[1]):
        problem = f'nvidia-smi reports "CUDA Version: {cuda[1]}": its libcuda does not fit the driver'
    rows = query(files, QUERY_FIELDS) or query(files, _OLD_DRIVER_FIELDS)
    gpus = tuple(_accelerator(row) for row in rows)
    if not gpus and (table is None or not table.is_ok):
        gpus = _from_driver(files)
    return NvidiaFacts(
        gpus=gpus,
        cuda=cuda[1] if cuda and _COMPUTE.fullmatch(cuda[1]) else None,
        driver=driver[1] if driver else next((g.driver for g in gpus if g.driver), None),
        problem=problem,
    )


def query(files: SystemFiles, fields: Sequence[str]) -> list[dict[str, str]]:
    """One mapping of field to text for each GPU; empty when nvidia-smi is absent or refuses a field."""
    output = files.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    return _parse_csv(output, fields)


def number(text: str | None) -> float | None:
    """The number a field holds, or None for "[N/A]", "Not Supported", "ERR!" and the like."""
    match = _NUMBER.fullmatch((text or "").strip())
    return float(match[0]) if match else None


def _parse_csv(output: CommandOutput | None, fields: Sequence[str]) -> list[dict[str, str]]:
    if output is None or not output.is_ok:
        return []
    rows = []
    for line in output.text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields):
            rows.append(dict(zip(fields, values, strict=True)))
    return rows


def _accelerator(row: dict[str, str]) -> Accelerator:
    memory_mib = number(row["memory.total"])
    compute = row.get("compute_cap", "")
    driver = row["driver_version"]
    return Accelerator(
        name=row["name"],
        kind=_kind(row["name"]),
        compute_capability=compute if _COMPUTE.fullmatch(compute) else None,
        memory_total_bytes=None if memory_mib is None else int(memory_mib) << 20,
        driver=driver if number(driver.partition(".")[0]) is not None else None,
    )


def _kind(name: str) -> AcceleratorKind:
    return "integrated" if _INTEGRATED.search(name) else "discrete"


def _from_driver(files: SystemFiles) -> tuple[Accelerator, ...]:
    """Cards as the kernel driver lists them, for containers that have the driver but no nvidia-smi."""
    version = _PROC_DRIVER.search(files.read_text("proc/driver/nvidia/version") or "")
    gpus = []
    for path in files.glob("proc/driver/nvidia/gpus/*/information"):
        model = re.search(r"^Model:\s*(.+)$", files.read_text(path) or "", re.MULTILINE)
        name = model[1].strip() if model else "NVIDIA GPU"
        gpus.append(Accelerator(name, _kind(name), None, None, version[1] if version else None))
    return tuple(gpus)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it said nothing")
