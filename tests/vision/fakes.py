"""What the worker's tests stand on: a fake runner, a gate that holds runs back, a box for replies."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np

from edgerun.engine.messages import Infer, Inferred, Message
from edgerun.errors import ModelError
from edgerun.repository.spec import ModelSpec
from edgerun.vision.ort_runner import OrtRunner, TensorSpec
from edgerun.vision.worker import VisionWorker


class Replies:
    """Collects the final messages by request id; a second one for an id is an error of the worker."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Message] = queue.Queue()
        self.seen: dict[int, Message] = {}

    def __call__(self, message: Message) -> None:
        self._queue.put(message)

    def get(self, request_id: int) -> Any:
        while request_id not in self.seen:
            self._take(self._queue.get(timeout=30))
        return self.seen[request_id]

    def all_now(self) -> dict[int, Message]:
        while not self._queue.empty():
            self._take(self._queue.get_nowait())
        return self.seen

    def _take(self, message: Any) -> None:
        assert message.request_id not in self.seen, f"a second answer: {message}"
        self.seen[message.request_id] = message


class Gate:
    """Holds a runner back: `started` counts the runs that began, which wait until `gate` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)

    def wait(self) -> None:
        self.started.release()
        assert self.gate.wait(timeout=30)


class FakeRunner:
    """Doubles its input; fails on a batch that holds 666."""

    def __init__(self) -> None:
        self.input = TensorSpec("x", (-1, 2), "float32")
        self.outputs = (TensorSpec("y", (-1, 2), "float32"),)
        self.batches: list[list[float]] = []
        self.held = Gate()
        self.is_closed = False
        self.threads: set[str] = set()

    def run(self, batch: Any) -> list[Any]:
        self.held.wait()
        assert not self.is_closed
        self.threads.add(threading.current_thread().name)
        self.batches.append(batch[:, 0].tolist())
        if (batch == 666).any():
            raise ModelError("the runtime chokes on 666")
        return [batch * 2]

    def close(self) -> None:
        self.is_closed = True


class HeldOrtRunner(OrtRunner):
    """The real runner behind a gate."""

    def __init__(self, spec: ModelSpec, provider: str, num_threads: int, held: Gate) -> None:
        super().__init__(spec.path, provider, num_threads)
        self.held = held

    def run(self, batch: Any) -> list[Any]:
        self.held.wait()
        return super().run(batch)


def picture(request_id: int, value: float, shape: tuple[int, ...] = (2,)) -> Infer:
    array = np.full(shape, value, dtype=np.float32)
    return Infer(
        request_id=request_id, model="tiny", data=array.tobytes(), shape=array.shape, dtype="float32"
    )


def output(message: Any, index: int = 0) -> np.ndarray:
    assert isinstance(message, Inferred), message
    tensor = message.outputs[index]
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)


def hold(worker: VisionWorker, held: Gate, request: Infer) -> None:
    """Leave the worker in the middle of running `request`, until the gate opens."""
    while held.started.acquire(blocking=False):
        pass
    held.gate.clear()
    worker.submit(request)
    assert held.started.acquire(timeout=30)


def rgb_picture(request_id: int, seed: int, dtype: str = "float32") -> tuple[Infer, np.ndarray]:
    array = np.random.default_rng(seed).random((3, 8, 8)).astype(dtype)
    message = Infer(request_id=request_id, model="tiny", data=array.tobytes(), shape=array.shape, dtype=dtype)
    return message, array.astype(np.float64).mean(axis=(1, 2)) * 10
