"""How busy, warm and hungry the device is now.

Reads /proc and /sys, and nvidia-smi only where a card is listed by it. Whatever cannot be read is None: on
Jetsons the load node may appear minutes after boot, so nothing is ruled out after a first failure.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from edgerun.device.files import SystemFiles, to_int
from edgerun.device.nvidia import QUERY_FIELDS, number, query
from edgerun.device.report import DeviceReport, Json

# JetPack 5, then 6 and later, then the same node by its devfreq name, which carries the address.
_GPU_LOAD = (
    "sys/devices/gpu.0/load",
    "sys/devices/platform/gpu.0/load",
    "sys/class/devfreq/*.gpu/device/load",
    "sys/class/devfreq/*.gv11b/device/load",
    "sys/devices/platform/bus@0/*.gpu/load",
)
_CPU_SENSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})
# nvidia-smi needs some 30 ms awake and seconds asleep: not for every reader of /metrics.
SMI_INTERVAL_S = 1.0
_SMI_FIELDS = ("utilization.gpu", "temperature.gpu", "power.draw")
_FIRST_SAMPLE_S = 0.1
# A rail that is off reads -256; above 150 the board would be off.
_CREDIBLE_C = (-40.0, 150.0)

_MEM_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d{1,15})\s*kB", re.MULTILINE)
_TEGRASTATS_TEMPERATURE = re.compile(r"\b[\w-]+@(-?\d+(?:\.\d+)?)C\b")
_TEGRASTATS_RAIL = re.compile(r"\b(V\w+)\s+(\d+)mW")


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """None: not readable here. Percentages are 0..100 of all cores, or of the busiest GPU.

    temperature_c: the hottest credible sensor of processor and GPU. power_w: the board's input where it is
    measured, else the sum of the rails or cards that are.
    """

    cpu_percent: float | None
    gpu_percent: float | None
    temperature_c: float | None
    power_w: float | None
    memory_available_bytes: int | None

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


class LoadReader:
    """Reads the load again and again. Keeps the CPU times of the last call, so one thread at a time.

    cpu_percent is the mean since the call before; the first call has none.
    """

    def __init__(
        self,
        report: DeviceReport,
        files: SystemFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files or SystemFiles()
        self._clock = clock
        self._asks_smi = bool(report.accelerators)
        self._smi: list[dict[str, str]] = []
        self._smi_at: float | None = None
        self._cpu_times: tuple[int, int] | None = None  # busy, total

    def read(self) -> DeviceLoad:
        """Blocks for as long as nvidia-smi takes, where there is one."""
        smi = self._read_smi()
        return DeviceLoad(
            cpu_percent=self._cpu_percent(),
            gpu_percent=_gpu_percent(self._files, smi),
            temperature_c=_temperature(self._files, smi),
            power_w=_power(self._files, smi),
            memory_available_bytes=_memory_available(self._files),
        )

    def _read_smi(self) -> list[dict[str, str]]:
        if not self._asks_smi:
            return []
        now = self._clock()
        if self._smi_at is None or now - self._smi_at >= SMI_INTERVAL_S:
            # The second query is the probe's: recorded board files have it, old drivers know its fields.
            self._smi = query(self._files, _SMI_FIELDS) or query(self._files, QUERY_FIELDS)
            self._smi_at = now
        return self._smi

    def _cpu_percent(self) -> float | None:
        before, self._cpu_times = self._cpu_times, _cpu_times(self._files)
        if before is None or self._cpu_times is None:
            return None
        busy, total = self._cpu_times[0] - before[0], self._cpu_times[1] - before[1]
        return _clamp(100 * busy / total) if total > 0 else None


def read_load(source: DeviceReport | LoadReader) -> DeviceLoad:
    """The load now. With a report: of this machine, over a tenth of a second, during which it blocks."""
    if isinstance(source, LoadReader):
        return source.read()
    reader = LoadReader(source)
    reader.read()
    time.sleep(_FIRST_SAMPLE_S)
    return reader.read()


def _cpu_times(files: SystemFiles) -> tuple[int, int] | None:
    """(busy, total) clock ticks of all cores since boot."""
    first_line = (files.read_text("proc/stat") or "").partition("\n")[0].split()
    if len(first_line) < 5 or first_line[0] != "cpu":
        return None
    # user nice system idle iowait irq softirq steal; guest times are counted in user already.
    ticks = [to_int(value) or 0 for value in first_line[1:9]]
    idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
    return sum(ticks) - idle, sum(ticks)


def _gpu_percent(files: SystemFiles, smi: list[dict[str, str]]) -> float | None:
    for pattern in _GPU_LOAD:
        for path in files.glob(pattern):
            per_mille = files.read_int(path)
            if per_mille is not None:
                return _clamp(per_mille / 10)
    return max(_numbers(smi, "utilization.gpu"), default=None)


def _temperature(files: SystemFiles, smi: list[dict[str, str]]) -> float | None:
    paths = list(files.glob("sys/class/thermal/thermal_zone*/temp"))
    for name in files.glob("sys/class/hwmon/hwmon*/name"):
        if (files.read_text(name) or "").strip() in _CPU_SENSORS:
            paths += files.glob(f"{name.rpartition('/')[0]}/temp*_input")
    sensors = [value / 1000 for path in paths if (value := files.read_int(path)) is not None]
    sensors += _numbers(smi, "temperature.gpu")
    sensors += [float(text) for text in _TEGRASTATS_TEMPERATURE.findall(_tegrastats(files))]
    return max((c for c in sensors if _CREDIBLE_C[0] < c < _CREDIBLE_C[1]), default=None)


def _power(files: SystemFiles, smi: list[dict[str, str]]) -> float | None:
    rails = _ina3221_rails(files) or {
        name: int(milliwatts) / 1000 for name, milliwatts in _TEGRASTATS_RAIL.findall(_tegrastats(files))
    }
    if "VDD_IN" in rails:  # NX and Nano measure the whole input; AGX only its rails
        return rails["VDD_IN"]
    watts = [*rails.values(), *_numbers(smi, "power.draw")]
    return round(sum(watts), 3) if watts else None


def _ina3221_rails(files: SystemFiles) -> dict[str, float]:
    """Watts of each rail that Jetson's power monitor measures: millivolts times milliamperes."""
    rails = {}
    for name in files.glob("sys/class/hwmon/hwmon*/name"):
        if (files.read_text(name) or "").strip() != "ina3221":
            continue
        folder = name.rpartition("/")[0]
        for channel in (1, 2, 3):
            label = (files.read_text(f"{folder}/in{channel}_label") or "").strip()
            millivolts = files.read_int(f"{folder}/in{channel}_input")
            milliamperes = files.read_int(f"{folder}/curr{channel}_input")
            if label and millivolts is not None and milliamperes is not None:
                rails[label] = millivolts * milliamperes / 1e6
    return rails


def _tegrastats(files: SystemFiles) -> str:
    """A recorded line. The real tool never ends, and it reads the same nodes that are read here."""
    output = files.run(["tegrastats"]) if files.is_sysroot else None
    return output.text if output else ""


def _memory_available(files: SystemFiles) -> int | None:
    match = _MEM_AVAILABLE.search(files.read_text("proc/meminfo") or "")
    return int(match[1]) * 1024 if match else None


def _numbers(smi: list[dict[str, str]], field: str) -> list[float]:
    return [value for row in smi if (value := number(row.get(field))) is not None]


def _clamp(percent: float) -> float:
    return round(min(100.0, max(0.0, percent)), 1)
