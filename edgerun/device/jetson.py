"""What a Jetson is: SoC, module, L4T and JetPack, CUDA and TensorRT on its disk, power mode.

Only reads. The device tree decides what the board is; host names and /etc/nv_tegra_release's BOARD field
do not, and the model string may name the development kit of a sibling.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from edgerun.device.files import SystemFiles

L4t = tuple[int, int, int]

# The release line; the date that follows is of two formats and is never read.
_RELEASE = re.compile(r"^#\s*R(\d{1,4})\s*\(release\),\s*REVISION:\s*(\d{1,4})(?:\.(\d{1,4}))?", re.MULTILINE)
_PACKAGE = re.compile(r"nvidia-l4t-core\s+(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?")
_PACKAGE_STATUS = re.compile(
    r"^Package: nvidia-l4t-core\n(?:[^\n]+\n)*?Version: (\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", re.MULTILINE
)
_TEGRA = re.compile(r"nvidia,(tegra\d{3})")
_MODULE = re.compile(r"\bp(\d{4})-(\d{4})")
_POWER_MODE = re.compile(r"^NV Power Mode:\s*(\S+)", re.MULTILINE)
_VERSION = re.compile(r"\.so\.(\d{1,4})\.(\d{1,4})(?:\.(\d{1,6}))?$")


@dataclass(frozen=True, slots=True)
class Soc:
    """compute_capability as CUDA 13 counts (Thor is 10.1 for CUDA 12.9 and older)."""

    family: str
    compute_capability: str
    gpu: str


SOCS = {
    "tegra186": Soc("TX2", "6.2", "gp10b"),
    "tegra194": Soc("Xavier", "7.2", "gv11b"),
    "tegra210": Soc("Nano", "5.3", "gm20b"),
    "tegra234": Soc("Orin", "8.7", "ga10b"),
    "tegra264": Soc("Thor", "11.0", "gb10b"),
}

# Module number (and variant, where the number alone does not tell) -> (name, memory in GiB or 0 for several).
_MODULES = {
    "2888": ("Jetson AGX Xavier", 0),
    "2972": ("Jetson AGX Xavier", 0),  # its development kit, which lists no module number
    "3668": ("Jetson Xavier NX", 0),
    "3701": ("Jetson AGX Orin", 0),
    "3767-0000": ("Jetson Orin NX", 16),
    "3767-0001": ("Jetson Orin NX", 8),
    "3767-0003": ("Jetson Orin Nano", 8),
    "3767-0004": ("Jetson Orin Nano", 4),
    "3767-0005": ("Jetson Orin Nano", 8),
    "3834": ("Jetson AGX Thor", 0),
}

# L4T -> JetPack, from NVIDIA's release notes. 36.4.7 and 36.5.0 are updates within the 6.2 family.
_JETPACKS: dict[L4t, str] = {
    (35, 1, 0): "5.0.2",
    (35, 2, 1): "5.1",
    (35, 3, 1): "5.1.1",
    (35, 4, 1): "5.1.2",
    (35, 5, 0): "5.1.3",
    (35, 6, 0): "5.1.4",
    (35, 6, 1): "5.1.5",
    (35, 6, 2): "5.1.5",
    (36, 2, 0): "6.0 DP",
    (36, 3, 0): "6.0",
    (36, 4, 0): "6.1",
    (36, 4, 2): "6.1.1",
    (36, 4, 3): "6.2",
    (36, 4, 4): "6.2.1",
    (36, 4, 7): "6.2.x",
    (36, 5, 0): "6.2.x",
    (38, 2, 0): "7.0",
    (38, 2, 1): "7.0",
    (38, 4, 0): "7.1",
    (39, 2, 0): "7.2",
    (39, 2, 1): "7.2.1",
}

_LIBRARY_DIRS = (
    *("usr/lib/*-linux-gnu", "usr/lib/*-linux-gnu/nvidia", "usr/lib/*-linux-gnu/tegra"),
    *("usr/lib", "usr/lib64", "usr/lib/wsl/lib", "usr/local/lib"),
    *("usr/local/cuda*/lib64", "usr/local/cuda*/targets/*/lib"),
    *("usr/local/tensorrt/lib", "usr/local/TensorRT*/lib", "opt/tensorrt/lib"),
)


@dataclass(frozen=True, slots=True)
class JetsonFacts:
    soc: str
    board: str
    l4t: str | None
    jetpack: str | None
    power_mode: str | None
    notes: tuple[str, ...]

    @property
    def silicon(self) -> Soc | None:
        """None for a SoC newer than this table."""
        return SOCS.get(self.soc)


def find_soc(compatible: tuple[str, ...]) -> str | None:
    """The last nvidia,tegraNNN; the generic nvidia,tegra23x and other vendors' entries do not count."""
    found = [match[1] for entry in compatible if (match := _TEGRA.fullmatch(entry))]
    return found[-1] if found else None


def read_jetson(
    files: SystemFiles, compatible: tuple[str, ...], model: str | None, memory_bytes: int
) -> JetsonFacts | None:
    """None when this is no Tegra."""
    soc = find_soc(compatible)
    if soc is None:
        return None
    board, board_note = _board(compatible, model, soc, memory_bytes)
    l4t = read_l4t(files)
    jetpack, jetpack_note = jetpack_of(l4t)
    notes = [note for note in (board_note, jetpack_note) if note]
    if l4t is None:
        where = " (a container does not see it)" if files.exists(".dockerenv") else ""
        notes.append(f"JetPack is unknown: /etc/nv_tegra_release does not tell{where}")
    if soc not in SOCS:
        notes.append(f"{soc} is newer than this edgerun: its compute capability is unknown")
    return JetsonFacts(
        soc=soc,
        board=board,
        l4t=".".join(map(str, l4t)) if l4t else None,
        jetpack=jetpack,
        power_mode=_power_mode(files),
        notes=tuple(notes),
    )


def read_l4t(files: SystemFiles) -> L4t | None:
    """From the release file, else from the package manager (the file is missing in containers)."""
    match = _RELEASE.search(files.read_text("etc/nv_tegra_release") or "")
    if match is None:
        package = files.run(["dpkg-query", "-W", "nvidia-l4t-core"])
        match = _PACKAGE.search(package.text) if package else None
    if match is None:
        match = _PACKAGE_STATUS.search(files.read_text("var/lib/dpkg/status") or "")
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def jetpack_of(l4t: L4t | None) -> tuple[str | None, str | None]:
    """(JetPack version, note). An L4T that is not in the table belongs to the family of the one before."""
    if l4t is None:
        return None, None
    if l4t in _JETPACKS:
        return _JETPACKS[l4t], None
    name = ".".join(map(str, l4t))
    newest = max(_JETPACKS)
    if l4t[0] > newest[0]:
        known = ".".join(map(str, newest))
        return None, f"L4T {name} is newer than this edgerun knows: treated like {known} (JetPack 7.2)"
    before = max((known for known in _JETPACKS if known[0] == l4t[0] and known < l4t), default=None)
    if before is None:
        return None, f"L4T {name} belongs to no JetPack that edgerun knows"
    family = ".".join(_JETPACKS[before].split()[0].split(".")[:2])
    return family, f"L4T {name} is not in the table: taken as of the JetPack {family} family"


def read_cuda(files: SystemFiles) -> str | None:
    """The CUDA toolkit or runtime on the disk, as major.minor."""
    text = files.read_text("usr/local/cuda/version.json")
    try:
        version = json.loads(text)["cuda"]["version"] if text else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        version = ""
    match = re.match(r"\d+\.\d+", version) if isinstance(version, str) else None
    if match:
        return match[0]
    # libcudart.so.12.6.77 is of CUDA 12.6; its last number counts its own builds.
    found = library_version(files, "libcudart")
    return ".".join(map(str, found[:2])) if found else None


def read_tensorrt(files: SystemFiles) -> str | None:
    found = library_version(files, "libnvinfer")
    return ".".join(map(str, found)) if found else None


def library_version(files: SystemFiles, library: str) -> tuple[int, ...] | None:
    """The highest X.Y[.Z] of files named library.so.X.Y[.Z]; a bare .so or .so.X tells too little."""
    versions = [
        tuple(int(part) for part in match.groups() if part is not None)
        for folder in _LIBRARY_DIRS
        for path in files.glob(f"{folder}/{library}.so.*")
        if (match := _VERSION.search(path))
    ]
    return max(versions, default=None)


def has_library(files: SystemFiles, name: str) -> bool:
    return any(files.glob(f"{folder}/{name}") for folder in _LIBRARY_DIRS)


def _board(
    compatible: tuple[str, ...], model: str | None, soc: str, memory_bytes: int
) -> tuple[str, str | None]:
    """(name, note). compatible names the carrier first and the module behind it."""
    for entry in compatible:
        if not entry.startswith("nvidia,"):
            continue
        # "p3768-0000+p3767-0005-super": the module is the last.
        for number, variant in reversed(_MODULE.findall(entry)):
            name, memory_gib = _MODULES.get(f"{number}-{variant}") or _MODULES.get(number) or ("", 0)
            if name:
                return name, _mismatch(name, memory_gib, model, memory_bytes)
    if model:
        return model, None
    return f"Jetson ({SOCS[soc].family if soc in SOCS else soc})", None


def _mismatch(name: str, memory_gib: int, model: str | None, memory_bytes: int) -> str | None:
    """Boards contradict themselves: the module number and MemTotal are believed, the model string is not."""
    # The firmware keeps up to a quarter of the memory for itself.
    if memory_gib and memory_bytes and not 0.6 * memory_gib <= memory_bytes / 2**30 <= memory_gib:
        has_gib = memory_bytes / 2**30
        return f"module {name} should have {memory_gib} GB, but memory is {has_gib:.1f} GiB: going by that"
    short = name.removeprefix("Jetson ")
    others = {known.removeprefix("Jetson ") for known, _ in _MODULES.values()} - {short}
    claimed = next((other for other in sorted(others) if model and other in model), None)
    if claimed and short not in (model or ""):
        return f'the model string says "{model}", the module number says {name}: going by the number'
    return None


def _power_mode(files: SystemFiles) -> str | None:
    # Read only: edgerun never changes the mode. Some releases answer only to root.
    output = files.run(["nvpmodel", "-q"])
    match = _POWER_MODE.search(output.text) if output else None
    return match[1] if match else None
