"""A missing extra is named instead of failing on an import."""

from __future__ import annotations

import importlib.util

from edgerun.errors import NativeLibraryMissing

# Top-level module -> the extras that bring it, the one for any machine first.
_EXTRAS_OF_MODULE = {
    "llama_cpp": ("cpu", "cuda"),
    "onnxruntime": ("cpu", "cuda"),
    "tensorrt": ("tensorrt",),
    "onnxruntime_ep_nv_tensorrt_rtx": ("rtx",),
    "textual": ("tui",),
}


def require_extra(module: str) -> None:
    """Raises NativeLibraryMissing that names the extra when module is not installed. Does not import it."""
    if importlib.util.find_spec(module) is not None:
        return
    commands = " or ".join(f"pip install 'edgerun[{extra}]'" for extra in _EXTRAS_OF_MODULE[module])
    raise NativeLibraryMissing(
        f"the Python package {module} is not installed: run {commands} (in a checkout: make run)",
        module=module,
    )
