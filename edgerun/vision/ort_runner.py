"""ONNX Runtime's home: opens one model on one execution provider and runs batches.

Owns the session and everything that depends on ONNX Runtime's habits: its silent fallbacks, its messages,
its dtypes. Does not know requests, pictures or batching policy. A runner belongs to one thread at a time.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgerun.errors import (
    EdgerunError,
    InvalidModelFile,
    ModelError,
    ModelLoadFailed,
    NativeLibraryMissing,
    ProviderUnavailable,
)
from edgerun.native.onnx_packages import check_one_onnxruntime

logger = logging.getLogger(__name__)

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(uint16)": "uint16",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}
# What a provider needs beside it for the nodes that it does not take. The first must really be in use.
_PROVIDER_CHAIN = {
    "TensorrtExecutionProvider": (
        "TensorrtExecutionProvider",
        "CUDAExecutionProvider",
        "CPUExecutionProvider",
    ),
    "CUDAExecutionProvider": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "CPUExecutionProvider": ("CPUExecutionProvider",),
}
_SEVERITY_FATAL = 4  # errors reach us as exceptions; ORT would print each of them to stderr as well


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared input or output. shape includes the batch axis; -1 where an axis is free."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # numpy's name


class OrtRunner:
    """One model, one picture input, one provider."""

    def __init__(
        self,
        path: str,
        provider: str,
        num_threads: int,
        *,
        input_name: str = "",
        output_names: Sequence[str] = (),
    ) -> None:
        """Open the model at `path`, whose external weights lie beside it.

        num_threads: of the CPU's operators; 0 lets ORT decide. input_name "": the only input. output_names:
        what run() returns; "" stands for the first declared output not named here, () for all.
        Raises InvalidModelFile for a file that ORT cannot read, ModelLoadFailed for one that does not fit
        these names, ProviderUnavailable when `provider` is not really in use, NativeLibraryMissing without
        ORT.
        """
        self.provider = provider
        self._session = _open_session(Path(path).absolute(), provider, num_threads)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1:
            names = ", ".join(node.name for node in inputs) or "none"
            raise ModelLoadFailed(
                f"{path} has {len(inputs)} inputs ({names}): a model with one input is needed"
            )
        self.input = _tensor_spec(_pick(inputs, input_name or inputs[0].name, path, "input"), path)
        chosen = [_pick(outputs, name, path, "output") for name in _fill_in(output_names, outputs)]
        self.outputs = tuple(_tensor_spec(node, path) for node in chosen)
        self._names = [spec.name for spec in self.outputs]
        if not self.input.shape:
            raise ModelLoadFailed(f"{path}: input {self.input.name!r} is a scalar: a batch axis is needed")
        self._fixed_batch = max(0, self.input.shape[0])  # 0: any size

    def run(self, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Run (n, ...) and return one (n, ...) array for each of `outputs`, in that order.

        The batch is cast to the declared dtype. A model with a fixed batch size is run as often as it takes,
        the last time filled up with zeros. Raises ModelError when the run fails or an output has no batch
        axis.
        """
        batch = np.ascontiguousarray(batch, dtype=np.dtype(self.input.dtype))
        size = self._fixed_batch or len(batch)
        runs = [self._run_once(batch[start : start + size], size) for start in range(0, len(batch), size)]
        if len(runs) == 1:
            return runs[0]
        return [np.concatenate(parts) for parts in zip(*runs, strict=True)]

    def close(self) -> None:
        """Free the session. run() must not be called after it."""
        self._session = None

    def _run_once(self, batch: NDArray[Any], size: int) -> list[NDArray[Any]]:
        num_real = len(batch)
        if num_real < size:
            filling = np.zeros((size - num_real, *batch.shape[1:]), dtype=batch.dtype)
            batch = np.concatenate([batch, filling])
        try:
            outputs = self._session.run(self._names, {self.input.name: batch})
        except Exception as error:  # ORT's exceptions share no base of their own
            raise ModelError(
                f"the model failed on an input of shape {batch.shape}: {_reason(error)}"
            ) from error
        for name, output in zip(self._names, outputs, strict=True):
            if not isinstance(output, np.ndarray) or output.shape[:1] != (size,):
                shape = getattr(output, "shape", type(output).__name__)
                raise ModelError(
                    f"output {name!r} is {shape} for a batch of {size}: a batch axis of {size} is needed"
                )
        return [output[:num_real] for output in outputs]


def _import_onnxruntime() -> Any:
    check_one_onnxruntime()
    # Its wheels (1.32) send usage data to Microsoft unless this is set before they are loaded.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        # Not an import statement: ONNX Runtime ships no types, and must not be needed to check ours.
        onnxruntime: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise NativeLibraryMissing(
            f"ONNX Runtime cannot be imported ({_one_line(str(error))}): install edgerun[cpu], or"
            " edgerun[cuda] for an NVIDIA GPU"
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise NativeLibraryMissing(
            "onnxruntime is an empty folder, as uninstalling a second package of it leaves behind: uninstall"
            " it and install one again"
        )
    # Model loading logs through the process-wide default logger, whatever the session's options say.
    onnxruntime.set_default_logger_severity(_SEVERITY_FATAL)
    return onnxruntime


def _open_session(path: Path, provider: str, num_threads: int) -> Any:
    if not path.is_file():
        raise InvalidModelFile(f"{path} is not a file: give the path of an .onnx model", path=str(path))
    if path.stat().st_size == 0:
        raise InvalidModelFile(f"{path} is empty (0 bytes): fetch it again", path=str(path))
    ort = _import_onnxruntime()
    available = ort.get_available_providers()
    if provider not in available:
        raise ProviderUnavailable(
            f"onnxruntime {ort.__version__} is built without {provider} (it has {', '.join(available)}):"
            " install the extra that brings it, or choose another provider",
            provider=provider,
        )
    if provider != "CPUExecutionProvider" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # finds CUDA and cuDNN of the nvidia-* wheels, as the probe's trial did
    try:
        session = ort.InferenceSession(
            str(path),
            sess_options=_session_options(ort, num_threads),
            providers=list(_PROVIDER_CHAIN.get(provider, (provider, "CPUExecutionProvider"))),
            enable_fallback=0,  # else ORT prints to stdout and goes on without the GPU
        )
    except Exception as error:  # ORT's exceptions share no base of their own
        raise _load_error(path, provider, error) from error
    in_use = session.get_providers()
    if not in_use or in_use[0] != provider:
        raise ProviderUnavailable(
            f"{provider} did not start, ONNX Runtime would run on {', '.join(in_use) or 'nothing'}: check"
            " the GPU driver and libraries with `edgerun doctor`",
            provider=provider,
        )
    logger.info("opened %s on %s", path, provider)
    return session


def _session_options(ort: Any, num_threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = _SEVERITY_FATAL
    # Spinning threads halve the throughput of whatever shares the cores with them: 45 against 98 pictures/s
    # of EfficientNet-Lite0, 2 threads on a loaded 2-core Xeon; they would starve the language model.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def _load_error(path: Path, provider: str, error: Exception) -> EdgerunError:
    """ORT's exception as one of ours, in one line; its own texts name C++ files and functions."""
    text = _one_line(str(error))
    kind = type(error).__name__
    if match := re.search(r"model IR version: (\d+), max supported IR version: (\d+)", text):
        found, newest = match.groups()
        return _invalid(path, f"has ONNX IR version {found}", f"export it for IR version {newest} or older")
    if match := re.search(r"Opset (\d+) is .*for domain (\S+) is till opset (\d+)", text):
        found, domain, newest = match.groups()
        return _invalid(path, f"has opset {found} of {domain}", f"export it for opset {newest} or older")
    if "xternal data" in text or "cannot get file size" in text:  # the second: ONNX Runtime 1.20
        missing = re.search(r'(?:does not exist: "|No such file or directory \[)([^"\]]+)', text)
        seen = f"{missing[1]} is missing" if missing else _reason(error)
        return _invalid(
            path, f"keeps its weights in another file and {seen}", "put that file beside the model"
        )
    if kind in ("InvalidProtobuf", "NoSuchFile", "NoModel"):
        size = path.stat().st_size
        return _invalid(
            path, f"({size} bytes) is no ONNX model, or is damaged or cut off", "fetch or export it again"
        )
    if kind == "InvalidGraph":
        return _invalid(path, f"is no valid ONNX graph ({_reason(error)})", "export it again")
    if kind == "EPFail" or (
        provider != "CPUExecutionProvider" and re.search(r"cuda|cudnn|tensorrt|nvinfer", text, re.I)
    ):
        return ProviderUnavailable(f"{provider} does not work here: {_reason(error)}", provider=provider)
    return ModelLoadFailed(f"ONNX Runtime cannot load {path} on {provider}: {_reason(error)}", path=str(path))


def _invalid(path: Path, what: str, remedy: str) -> InvalidModelFile:
    return InvalidModelFile(f"{path} {what}: {remedy}", path=str(path))


def _reason(error: Exception) -> str:
    """ORT's sentence without "[ONNXRuntimeError] : 1 : FAIL :" and C++ locations, at most 300 characters."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", _one_line(str(error)))
    text = re.sub(r"/\S+\.(?:cc|h|cu):\d+ .*?\) (?=[A-Z])", "", text)
    return text[:300] or type(error).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _tensor_spec(node: Any, path: str) -> TensorSpec:
    dtype = _DTYPES.get(node.type)
    if dtype is None:
        raise ModelLoadFailed(
            f"{path}: {node.name!r} is of type {node.type}, which is not a tensor we can pass"
        )
    # A free axis is None or a name; the name has no meaning here.
    shape = tuple(axis if isinstance(axis, int) else -1 for axis in node.shape)
    return TensorSpec(name=node.name, shape=shape, dtype=dtype)


def _fill_in(names: Sequence[str], outputs: Sequence[Any]) -> list[str]:
    declared = [node.name for node in outputs]
    if not names:
        return declared
    unnamed = next((name for name in declared if name not in names), "")
    return [name or unnamed for name in names]


def _pick(nodes: Sequence[Any], name: str, path: str, role: str) -> Any:
    """nodes: ORT's NodeArg, which has name, type and shape."""
    for node in nodes:
        if node.name == name:
            return node
    names = ", ".join(node.name for node in nodes)
    raise ModelLoadFailed(f"{path} has no {role} {name!r}: it has {names}")
