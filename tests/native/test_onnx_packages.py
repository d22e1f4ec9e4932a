from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest

from edgerun.errors import DeviceError
from edgerun.native.onnx_packages import check_one_onnxruntime


def environment(**versions: str) -> Callable[[str], str]:
    def version_of(name: str) -> str:
        key = name.replace("-", "_")
        if key not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[key]

    return version_of


def test_both_packages_are_refused_with_what_to_run() -> None:
    with pytest.raises(DeviceError, match="pip uninstall -y onnxruntime onnxruntime-gpu`"):
        check_one_onnxruntime(environment(onnxruntime="1.32.0", onnxruntime_gpu="1.31.1"))


@pytest.mark.parametrize("versions", [{}, {"onnxruntime": "1.32.0"}, {"onnxruntime_gpu": "1.31.1"}])
def test_one_or_none_is_fine(versions: dict[str, str]) -> None:
    check_one_onnxruntime(environment(**versions))
