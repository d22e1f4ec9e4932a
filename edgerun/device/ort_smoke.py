"""Child process: does one ONNX Runtime execution provider really compute here?

    python -m edgerun.device.ort_smoke CUDAExecutionProvider

Prints one JSON line {"ok": bool, "detail": str} and exits 0 or 1. A process of its own, because a bad driver
takes down the process that tries it, and because listing providers proves nothing: ONNX Runtime lists what it
was compiled with, and a session without the provider it was asked for works on the CPU without a word.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Sequence
from typing import Any

# Input X (1,1,4,4) = 0..15. Conv with a 3x3 kernel of ones gives the window sums below; Conv is in it because
# it is what needs cuDNN. MatMul by [[1,2],[3,4]] then gives EXPECTED. Small integers are exact in TF32 too.
EXPECTED = (45 + 3 * 54, 2 * 45 + 4 * 54, 81 + 3 * 90, 2 * 81 + 4 * 90)
TOLERANCE = 1e-3

_CPU = "CPUExecutionProvider"


def tiny_model() -> bytes:
    """An ONNX model of one Conv and one MatMul, written as protobuf by hand to spare the onnx package.

    Field numbers are of onnx.proto3 (ModelProto, GraphProto, NodeProto, TensorProto, ValueInfoProto); IR
    version 8 and opset 13 are read by every ONNX Runtime since 1.10.
    """
    nodes = [_node("Conv", ["X", "K"], "C"), _node("MatMul", ["C", "W"], "Y")]
    tensors = [_tensor("K", (1, 1, 3, 3), [1.0] * 9), _tensor("W", (2, 2), [1.0, 2.0, 3.0, 4.0])]
    graph = b"".join(
        [
            *(_bytes(1, node) for node in nodes),
            _bytes(2, b"smoke"),
            *(_bytes(5, tensor) for tensor in tensors),
            _bytes(11, _value_info("X", (1, 1, 4, 4))),
            _bytes(12, _value_info("Y", (1, 1, 2, 2))),
        ]
    )
    return _int(1, 8) + _bytes(7, graph) + _bytes(8, _bytes(1, b"") + _int(2, 13))


def check(provider: str) -> str:
    """What ran, in words. Raises what ONNX Runtime raises, and RuntimeError when it did something else."""
    ort = importlib.import_module("onnxruntime")
    version = getattr(ort, "__version__", None)
    if version is None:
        raise RuntimeError("onnxruntime is an empty folder: uninstall it and install it again")
    available = ort.get_available_providers()
    if provider not in available:
        raise RuntimeError(
            f"onnxruntime {version} was built without it (it has {', '.join(map(_short, available))})"
        )
    run_session(_session(ort, provider), provider)
    return f"ran a test model (onnxruntime {version})"


def run_session(session: Any, provider: str) -> None:
    """Run the tiny model. RuntimeError when another provider took the session or the numbers are wrong."""
    np = importlib.import_module("numpy")
    used = session.get_providers()
    if not used or used[0] != provider:
        raise RuntimeError(f"the session runs on {', '.join(used)} instead")
    pixels = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    result = session.run(None, {"X": pixels})[0].ravel().tolist()
    # `not <=`: a NaN must not pass.
    wrong = [a for a, b in zip(result, EXPECTED, strict=False) if not abs(a - b) <= TOLERANCE]
    if len(result) != len(EXPECTED) or wrong:
        raise RuntimeError(f"it computed {result} instead of {list(EXPECTED)}")


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        sys.stderr.write("usage: python -m edgerun.device.ort_smoke PROVIDER\n")
        return 2
    try:
        ok, detail = True, check(argv[0])
    except Exception as error:  # this process exists to find out; whatever it was is the answer
        ok, detail = False, _one_line(error)
    sys.stdout.write(json.dumps({"ok": ok, "detail": detail}) + "\n")
    return 0 if ok else 1


def _session(ort: Any, provider: str) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if provider != _CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # finds CUDA and cuDNN of the nvidia-* wheels
    return ort.InferenceSession(tiny_model(), options, providers=[provider])


def _one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")


# ---- protobuf wire format: a key is (field number << 3) | type; type 0 is a varint, 2 is length-delimited


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _node(op_type: str, inputs: Sequence[str], output: str) -> bytes:
    names = b"".join(_bytes(1, name.encode()) for name in inputs)
    return names + _bytes(2, output.encode()) + _bytes(4, op_type.encode())


def _tensor(name: str, shape: Sequence[int], values: Sequence[float]) -> bytes:
    dims = b"".join(_int(1, dim) for dim in shape)
    raw = struct.pack(f"<{len(values)}f", *values)
    return dims + _int(2, 1) + _bytes(8, name.encode()) + _bytes(9, raw)  # data_type 1: FLOAT


def _value_info(name: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(_bytes(1, _int(1, dim)) for dim in shape)
    tensor_type = _int(1, 1) + _bytes(2, dims)  # elem_type FLOAT, shape
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, tensor_type))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
