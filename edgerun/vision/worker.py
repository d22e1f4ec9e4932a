"""The thread that runs one loaded vision model: takes requests, batches them, answers each exactly once.

Owns the queue (under one lock), the counters and the runner. Does not decode pictures, name classes or know
ONNX Runtime beyond the VisionRunner interface.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from edgerun.engine.messages import Failed, Infer, Inferred, Message, OutputTensor, VisionInfo, VisionStats
from edgerun.errors import EdgerunError, EngineLost, ModelError, ModelLoadFailed
from edgerun.repository.spec import ModelSpec
from edgerun.vision import checks
from edgerun.vision.batcher import DynamicBatcher, Queued
from edgerun.vision.checks import DeclaredTensor
from edgerun.vision.ort_runner import OrtRunner

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

# Larger batches lose on a CPU, whose caches they overflow: EfficientNet-Lite0 gave 128, 125, 119 and 88
# pictures/s in batches of 1, 2, 4 and 8 (1 thread of a 2-core Xeon, onnxruntime 1.32, 20 photos at once).
_MAX_CPU_BATCH_SIZE = 4


class VisionRunner(Protocol):
    """A loaded model. `outputs` name what run() returns, in order; both sides have the batch axis first."""

    @property
    def input(self) -> DeclaredTensor: ...
    @property
    def outputs(self) -> Sequence[DeclaredTensor]: ...
    def run(self, batch: NDArray[Any]) -> list[NDArray[Any]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Picture:
    request_id: int
    array: NDArray[Any]  # without the batch axis


class VisionWorker:
    """Loads in the constructor; from then on any thread may submit."""

    def __init__(
        self,
        spec: ModelSpec,
        provider: str,
        reason: str,
        num_threads: int,
        reply: Callable[[Message], None],
        *,
        open_runner: Callable[[ModelSpec, str, int], VisionRunner] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """provider: to run on, chosen before (reason: why). num_threads: unless the model's config sets them.

        reply takes the one final message of each request; it is called from the worker's thread, or from the
        submitter's for a request that is refused at once. It must be thread-safe and must not block for long.
        Raises InvalidModelFile, ModelLoadFailed or ProviderUnavailable; then no thread was started.
        """
        self.provider = provider
        self.reason = reason
        self._reply = reply
        self._clock = clock
        self._runner, self.info, self.size_bytes = _load(
            spec, provider, num_threads, open_runner or _open_ort
        )
        self._name = spec.name
        self._batcher: DynamicBatcher[_Picture] = DynamicBatcher(
            spec.vision.dynamic_batching, _max_batch_size(spec, provider), clock
        )
        self._changed = threading.Condition()  # guards the batcher, the counters and the two below
        self._is_closing = self._runs_waiting = False
        self._num_running = 0
        self._counts = _Counts()
        self._thread = threading.Thread(target=self._work, name=f"vision-{spec.name}", daemon=True)
        self._thread.start()

    def submit(self, request: Infer) -> None:
        """Queue one picture. Never raises for a bad one: it is answered with Failed, as is one too many."""
        try:
            picture = _Picture(request.request_id, checks.read_input(request, self._runner.input))
            with self._changed:
                if self._is_closing:
                    raise self._unloaded()
                self._batcher.put(picture)
                self._changed.notify()
        except EdgerunError as error:
            self._fail(request.request_id, error)

    def stats(self) -> VisionStats:
        with self._changed:
            return VisionStats(
                inference_count=self._counts.inferences,
                execution_count=self._counts.executions,
                failure_count=self._counts.failures,
                pending=len(self._batcher) + self._num_running,
                queue_us=int(self._counts.queue_s * 1e6),
                infer_us=int(self._counts.infer_s * 1e6),
            )

    def close(self, *, runs_waiting: bool = False) -> None:
        """Let the running batch end, run or fail what waits, free the model. Again: does nothing."""
        with self._changed:
            self._is_closing, self._runs_waiting = True, runs_waiting
            self._changed.notify()
        self._thread.join()

    # ---- the worker's thread

    def _work(self) -> None:
        while batch := self._wait_for_batch():
            by_shape: dict[tuple[int, ...], list[Queued[_Picture]]] = {}
            for queued in batch:  # a model with free axes may get several sizes; each is a batch of its own
                by_shape.setdefault(queued.item.array.shape, []).append(queued)
            for group in by_shape.values():
                self._run_group(group)
        with self._changed:
            waiting = self._batcher.drain()
        for picture in waiting:
            self._fail(picture.request_id, self._unloaded())
        self._runner.close()

    def _wait_for_batch(self) -> tuple[Queued[_Picture], ...]:
        """Block until a batch is due; () when closing."""
        with self._changed:
            self._num_running = 0
            while not self._is_closing or (self._runs_waiting and len(self._batcher)):
                if batch := self._batcher.next_batch():
                    self._num_running = len(batch)
                    return batch
                self._changed.wait(self._batcher.wait_s())
            return ()

    def _run_group(self, group: list[Queued[_Picture]]) -> None:
        """Pictures of one shape. When they fail together each runs alone: a bad one spoils only itself."""
        started_s = self._clock()
        try:
            outputs = self._runner.run(np.stack([queued.item.array for queued in group]))
        except Exception as error:  # whatever it is, it must end as an answer and leave the thread alive
            if len(group) > 1:
                logger.warning(
                    "%s: a batch of %d failed, running one by one: %s", self._name, len(group), error
                )
                for queued in group:
                    self._run_group([queued])
                return
            self._fail(group[0].item.request_id, error)
            return
        infer_s = self._clock() - started_s
        with self._changed:
            self._counts.add(group, started_s, infer_s)
        for row, queued in enumerate(group):
            tensors = [
                OutputTensor(spec.name, output[row].tobytes(), output.shape[1:], output.dtype.name)
                for spec, output in zip(self._runner.outputs, outputs, strict=True)
            ]
            self._send(
                Inferred(
                    request_id=queued.item.request_id,
                    outputs=tensors,
                    provider=self.provider,
                    queue_ms=(started_s - queued.arrived_s) * 1e3,
                    infer_ms=infer_s * 1e3,
                    batch_size=len(group),
                )
            )

    # ---- answers

    def _fail(self, request_id: int, error: Exception) -> None:
        with self._changed:
            self._counts.failures += 1
        self._send(Failed.of(request_id, error))

    def _send(self, message: Message) -> None:
        try:
            self._reply(message)
        except Exception:  # the channel is gone; the other requests still need their end
            logger.exception("%s: an answer could not be delivered", self._name)

    def _unloaded(self) -> EdgerunError:
        return EngineLost(f"model {self._name} was unloaded before this picture ran: send it again")


@dataclass(slots=True)
class _Counts:
    """Triton's counters. Written under the worker's lock."""

    inferences: int = 0
    executions: int = 0
    failures: int = 0
    queue_s: float = 0.0
    infer_s: float = 0.0

    def add(self, group: list[Queued[_Picture]], started_s: float, infer_s: float) -> None:
        self.inferences += len(group)
        self.executions += 1
        self.queue_s += sum(started_s - queued.arrived_s for queued in group)
        self.infer_s += infer_s


def _max_batch_size(spec: ModelSpec, provider: str) -> int:
    """The model's limit; on a CPU the smaller one, unless its config prefers more."""
    settings = spec.vision
    if provider != "CPUExecutionProvider":
        return settings.max_batch_size
    return min(
        settings.max_batch_size, max(_MAX_CPU_BATCH_SIZE, settings.dynamic_batching.preferred_batch_size)
    )


def _open_ort(spec: ModelSpec, provider: str, num_threads: int) -> VisionRunner:
    names = checks.output_names(spec.vision)
    return OrtRunner(spec.path, provider, num_threads, input_name=spec.vision.input, output_names=names)


def _load(
    spec: ModelSpec,
    provider: str,
    num_threads: int,
    open_runner: Callable[[ModelSpec, str, int], VisionRunner],
) -> tuple[VisionRunner, VisionInfo, int]:
    """Open, warm up and check. The last value is the memory that it took in bytes.

    That is the growth of this process, at least the size of the file: an estimate, as other threads grow and
    shrink meanwhile and a GPU's memory is not seen.
    """
    process = psutil.Process()
    rss_before = process.memory_info().rss
    runner = open_runner(spec, provider, spec.vision.num_threads or num_threads)
    try:
        outputs = _warm_up(spec, runner)
    except BaseException:
        runner.close()
        raise
    info = VisionInfo(
        input_name=runner.input.name,
        input_shape=runner.input.shape,
        input_dtype=runner.input.dtype,
        output_names=[output.name for output in runner.outputs],
        num_classes=outputs[0].size,
    )
    grown = process.memory_info().rss - rss_before
    return runner, info, max(grown, Path(spec.path).stat().st_size)


def _warm_up(spec: ModelSpec, runner: VisionRunner) -> list[NDArray[Any]]:
    """Run one picture, so that the first request pays for no lazy set-up, and check what comes out."""
    shape = checks.check_input(spec, runner.input)
    # Noise, not zeros: softmax is told by what comes out of a picture with content. Seed 0: repeatable.
    noise = np.random.default_rng(0).integers(0, 256, size=(1, *shape), dtype=np.uint8)
    dtype = np.dtype(runner.input.dtype)
    values = noise / np.float32(255) if dtype.kind == "f" else noise
    try:
        outputs = runner.run(values.astype(dtype))
    except ModelError as error:
        raise ModelLoadFailed(
            f"model {spec.name} fails on a test picture: {error.message}", name=spec.name
        ) from error
    if spec.vision.task == "classify":
        checks.check_classes(spec, outputs[0])
    return outputs
