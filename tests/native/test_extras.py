from __future__ import annotations

import pytest

from edgerun.errors import NativeLibraryMissing
from edgerun.native.extras import require_extra


def test_missing_module_names_the_extra_that_brings_it() -> None:
    # Not one of our extras in any environment of ours, so it is absent everywhere the tests run.
    with pytest.raises(NativeLibraryMissing, match=r"pip install 'edgerun\[rtx\]'"):
        require_extra("onnxruntime_ep_nv_tensorrt_rtx")


def test_installed_module_passes_without_being_imported() -> None:
    require_extra("llama_cpp")
