"""The board and SoC of a machine that is no Jetson: single-board computers, PCs, WSL2, containers."""

from __future__ import annotations

from edgerun.device.files import SystemFiles

# Vendors leave these in the firmware of machines that have no product name.
_NO_NAMES = frozenset(
    {"", "system product name", "to be filled by o.e.m.", "default string", "none", "o.e.m."}
)


def read_compatible(files: SystemFiles) -> tuple[str, ...]:
    """The device tree's list, most specific first; empty on a PC."""
    return files.read_strings("proc/device-tree/compatible") or files.read_strings(
        "sys/firmware/devicetree/base/compatible"
    )


def read_model(files: SystemFiles) -> str | None:
    strings = files.read_strings("proc/device-tree/model") or files.read_strings(
        "sys/firmware/devicetree/base/model"
    )
    return strings[0] if strings else None


def read_soc(compatible: tuple[str, ...]) -> str | None:
    """The last entry is the SoC by the device-tree convention: brcm,bcm2712 -> bcm2712."""
    return compatible[-1].rpartition(",")[2] if compatible else None


def read_board(files: SystemFiles) -> str | None:
    model = read_model(files)
    if model:
        return model
    if is_wsl(files):
        return "WSL2"
    product = (files.read_text("sys/class/dmi/id/product_name") or "").strip()
    return None if product.lower() in _NO_NAMES else product


def is_wsl(files: SystemFiles) -> bool:
    return "microsoft" in (files.read_text("proc/sys/kernel/osrelease") or "").lower()


def is_container(files: SystemFiles) -> bool:
    return files.exists(".dockerenv") or files.exists("run/.containerenv")
