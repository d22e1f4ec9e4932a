"""onnxruntime and onnxruntime-gpu share one folder: the second to be installed silently breaks the first."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from edgerun.errors import DeviceError

_PACKAGES = ("onnxruntime", "onnxruntime-gpu")


def check_one_onnxruntime(version_of: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raises DeviceError, saying what to uninstall, when both are installed.

    With the CPU wheel on top the GPU is silently gone, and uninstalling one leaves an empty folder of the
    other: so both have to go.
    """
    installed = []
    for name in _PACKAGES:
        try:
            installed.append(f"{name} {version_of(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(installed) > 1:
        raise DeviceError(
            f"{' and '.join(installed)} are both installed and overwrite each other: run"
            " `pip uninstall -y onnxruntime onnxruntime-gpu`, then `pip install 'edgerun[cpu]'` or"
            " `pip install 'edgerun[cuda]'`"
        )
