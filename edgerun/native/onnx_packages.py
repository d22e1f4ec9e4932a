"""The distributions of ONNX Runtime share one folder: the second to be installed silently breaks the first.

With the CPU one on top the GPU is gone without a word, and uninstalling one leaves an empty folder of the
other. So exactly one may be installed; the probe, the doctor and the runner all ask here.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping

from edgerun.errors import DeviceError

ONNXRUNTIMES = (
    *("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"),
    *("onnxruntime-rocm", "onnxruntime-migraphx", "onnxruntime-qnn", "ort-nightly", "ort-nightly-gpu"),
)


def installed_onnxruntimes(
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> dict[str, str]:
    """Name and version of each installed distribution that provides `onnxruntime`."""
    installed = {}
    for name in ONNXRUNTIMES:
        try:
            installed[name] = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def clash(installed: Mapping[str, str]) -> str:
    """What to say when more than one is installed."""
    names = " and ".join(f"{name} {version}" for name, version in sorted(installed.items()))
    return (
        f"{names} are installed together and overwrite each other: run "
        f"`pip uninstall -y {' '.join(sorted(installed))}`, then `pip install 'edgerun[cpu]'` or "
        "`pip install 'edgerun[cuda]'`"
    )


def check_one_onnxruntime(version_of: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raises DeviceError, saying what to uninstall, when more than one is installed."""
    installed = installed_onnxruntimes(version_of)
    if len(installed) > 1:
        raise DeviceError(clash(installed))
