"""The server's side of the engine: start it, talk to it, and have a new one when it dies or is stuck.

After a crash the models are loaded again. Requests that nobody has seen a token of are submitted again, once;
those in mid-stream end with EngineLost. Every request ends exactly once. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from edgerun.engine.calls import Call, Generation, engine_lost
from edgerun.engine.check import CheckedModels, check_model
from edgerun.engine.messages import (
    Abort,
    FromEngine,
    GetStats,
    Infer,
    Inferred,
    Load,
    Loaded,
    Ping,
    Pong,
    Progress,
    Ready,
    Start,
    Stats,
    Submit,
    Tokenize,
    Tokenized,
    Tokens,
    Unload,
    Unloaded,
)
from edgerun.engine.process import EngineProcess
from edgerun.engine.watch import Watch
from edgerun.errors import DeadlineExceeded, EdgerunError, EngineLost, ModelNotFound
from edgerun.repository.spec import ModelSpec
from edgerun.text.prompt import Prompt

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "restarting", "stopped"]
_A = TypeVar("_A", Inferred, Loaded, Stats, Tokenized, Unloaded)
_READY_TIMEOUT_S = 120.0  # how long a new request waits for an engine that is being restarted
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 10.0  # between restarts of an engine that dies again and again
_MAX_DEADLY_LOADS = 3
_HEALTHY_AFTER_S = 30.0  # an engine that lived this long starts the delays anew
# Of one step. 512 tokens of a prompt take a 14B model on a Raspberry Pi 5 more than a minute (an estimate).
DEFAULT_STEP_TIMEOUT_S = 120


class EngineClient:
    """One engine process at a time. All methods belong to the event loop that called start()."""

    def __init__(
        self,
        start: Start,
        *,
        log_level: str = "WARNING",
        checked: CheckedModels | None = None,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> None:
        """step_timeout_s: after which a step that runs is taken for one that never ends (see Watch)."""
        self._start, self._log_level = start, log_level
        self._checked = checked or CheckedModels()
        self._ids = itertools.count(1)
        self._pending: dict[int, Call | Generation] = {}
        self._loads: dict[str, Load] = {}  # of the loaded models, to be sent again to a new engine
        self._num_deadly_loads: Counter[str] = Counter()
        self._process: EngineProcess | None = None
        self._step_timeout_s = step_timeout_s
        self._watch = Watch(step_timeout_s)
        self._last_end = ""  # how the engine before this one ended
        self._supervisor: asyncio.Task[None] | None = None
        self._restorer: asyncio.Task[None] | None = None
        self._is_settled = asyncio.Event()  # set while the state is "ready" or "stopped"
        self._is_settled.set()
        self.loaded: dict[str, Loaded] = {}
        self.state: EngineState = "stopped"
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def trouble(self) -> str:
        """Why a request that comes now will not be answered soon; "" when it will."""
        if self.state == "ready":
            return self._watch.trouble
        how = f": the one before {self._last_end}" if self.state == "restarting" else ""
        return f"the engine is {self.state}{how}"

    # ---- life

    async def start(self) -> None:
        """Raises EngineLost when the engine does not come up."""
        self._enter("starting")
        try:
            self._process = await EngineProcess.launch(self._start, self._log_level)
        except BaseException:
            self._enter("stopped")
            raise
        self._enter("ready")
        self._supervisor = asyncio.create_task(self._supervise(self._process), name="engine-supervisor")

    async def stop(self) -> None:
        """End the engine; whatever still waits ends with EngineLost."""
        self._enter("stopped")
        tasks = [task for task in (self._supervisor, self._restorer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()
            self._process = None
        self._fail_pending(EngineLost("the server is stopping"))

    def _enter(self, state: EngineState) -> None:
        self.state = state
        if state in ("ready", "stopped"):
            self._is_settled.set()
        else:
            self._is_settled.clear()

    # ---- requests

    async def generate(self, model: str, prompt: Prompt) -> Generation:
        """Returns once the prompt is accepted. Raises ContextLengthExceeded, InvalidRequest, QueueFull,
        EngineLost."""
        message = Submit(request_id=next(self._ids), model=model, prompt=prompt)
        generation = Generation(message, self._abort)
        await self._send(generation)
        try:
            await generation.accepted
        except asyncio.CancelledError:
            generation.cancel()
            raise
        return generation

    async def tokenize(self, model: str, prompt: Prompt) -> list[int]:
        message = Tokenize(request_id=next(self._ids), model=model, prompt=prompt)
        return (await self._call(Call(message, can_retry=True), Tokenized)).token_ids

    async def infer(self, model: str, data: bytes, shape: tuple[int, ...], dtype: str) -> Inferred:
        """One preprocessed picture, without the batch axis."""
        message = Infer(request_id=next(self._ids), model=model, data=data, shape=shape, dtype=dtype)
        return await self._call(Call(message, can_retry=True), Inferred)

    async def stats(self) -> Stats:
        return await self._call(Call(GetStats(request_id=next(self._ids)), can_retry=False), Stats)

    async def load(self, spec: ModelSpec, on_progress: Callable[[Progress], None] | None = None) -> Loaded:
        """Load or replace a model; a file that was never seen is tried in a child process first."""
        if on_progress is not None:
            on_progress(Progress(request_id=0, stage="check", done=0, total=0))
        tuning = await check_model(spec, self._start, self._checked)
        await self._wait_until_ready()
        message = Load(request_id=next(self._ids), spec=spec, tuning=tuning)
        loaded = await self._load(message, on_progress)
        self._loads[spec.name] = message
        return loaded

    async def _load(self, message: Load, on_progress: Callable[[Progress], None] | None) -> Loaded:
        loaded = await self._call(Call(message, can_retry=False, on_progress=on_progress), Loaded)
        self.loaded[message.spec.name] = loaded
        return loaded

    async def unload(self, name: str) -> None:
        was_known = self._loads.pop(name, None) is not None
        try:
            await self._call(Call(Unload(request_id=next(self._ids), model=name), can_retry=False), Unloaded)
        except ModelNotFound:
            if not was_known:
                raise
            # An engine that was restarted meanwhile did not load it again.
        self.loaded.pop(name, None)

    async def _call(self, call: Call, kind: type[_A]) -> _A:
        await self._send(call)
        answer = await call.answer
        assert isinstance(answer, kind), f"{type(answer).__name__} came for {kind.__name__}"
        return answer

    async def _send(self, request: Call | Generation) -> None:
        if not isinstance(request.message, Load):  # _restore loads before the engine counts as ready
            await self._wait_until_ready()
        if self._process is None:
            raise EngineLost("the engine is not running")
        message = request.next_message()
        self._pending[message.request_id] = request
        self._process.channel.send(message)

    async def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while self.state not in ("ready", "stopped"):
            try:
                await asyncio.wait_for(self._is_settled.wait(), deadline_s - time.monotonic())
            except asyncio.TimeoutError:
                raise EngineLost(f"the engine was not back within {_READY_TIMEOUT_S:.0f} s") from None
        if self.state == "stopped":
            raise EngineLost("the server is stopping")

    def _abort(self, request_id: int) -> None:
        if self._process is not None:
            self._process.channel.send(Abort(request_id=request_id))

    # ---- answers

    async def _read(self, process: EngineProcess) -> None:
        """Hand messages out until the engine is gone."""
        while (message := await process.channel.receive()) is not None:
            self._deliver(message)

    def _deliver(self, message: FromEngine) -> None:
        if isinstance(message, Tokens):
            for output in message.outputs:
                generation = self._pending.get(output.request_id)
                if isinstance(generation, Generation) and generation.take_output(output):
                    del self._pending[output.request_id]
            return
        if isinstance(message, Pong):
            self._watch.take(message)
            return
        if isinstance(message, Ready):
            return
        request = self._pending.get(message.request_id)
        if request is not None and request.take(message):
            del self._pending[request.message.request_id]

    # ---- restarts

    async def _supervise(self, process: EngineProcess) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            started = time.monotonic()
            stuck = await self._attend(process)
            self._on_death(_how_it_ended(await process.reap(), stuck))
            if time.monotonic() - started > _HEALTHY_AFTER_S:
                delay_s = _FIRST_DELAY_S
            process, delay_s = await self._relaunch(delay_s)

    async def _attend(self, process: EngineProcess) -> str:
        """Returns when it is gone: what was wrong with it if it was stuck, else ""."""
        watch = self._watch = Watch(self._step_timeout_s)
        watching = asyncio.create_task(_end_when_stuck(process, watch), name="engine-watch")
        watching.add_done_callback(_log_failure)
        try:
            await self._read(process)
        finally:
            watching.cancel()
        return watch.verdict

    def _on_death(self, how: str) -> None:
        logger.error("the engine process %s; starting a new one", how)
        self._last_end = how
        self._enter("restarting")
        self._process = None
        self.num_restarts += 1
        self.loaded.clear()
        kept: list[Call | Generation] = []
        for request in self._take_pending():  # in the order of arrival, which stays
            if not request.is_abandoned and request.may_resubmit:
                kept.append(request)
            else:
                request.fail(engine_lost(how))
        self._pending = {request.message.request_id: request for request in kept}

    async def _relaunch(self, delay_s: float) -> tuple[EngineProcess, float]:
        """A new engine with the same models. Tries until it succeeds, ever more slowly."""
        while True:
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_DELAY_S)
            try:
                process = await EngineProcess.launch(self._start, self._log_level)
            except EngineLost as error:
                logger.error("%s; next try in %.1f s", error, delay_s)
                self._fail_pending(error)  # nobody knows when an engine will come; new requests wait a while
                continue
            self._process = process
            self._restorer = asyncio.create_task(self._restore(process), name="engine-restore")
            self._restorer.add_done_callback(_log_failure)
            return process, delay_s

    async def _restore(self, process: EngineProcess) -> None:
        """Load the models again, then submit what had waited. Runs beside the reader."""
        for load in tuple(self._loads.values()):
            name = load.spec.name
            try:
                await self._load(msgspec.structs.replace(load, request_id=next(self._ids)), None)
                self._num_deadly_loads.pop(name, None)
            except EngineLost:
                self._note_deadly_load(name)
                return  # the next engine carries on
            except EdgerunError as error:
                logger.error("%s could not be loaded again: %s", name, error)
        if self._process is not process:
            return  # it died meanwhile; the next one carries on
        for request_id, request in list(self._pending.items()):
            try:
                if request.is_abandoned:  # by its client, while there was no engine to tell
                    raise engine_lost(self._last_end)
                process.channel.send(request.next_message())
            except (EngineLost, DeadlineExceeded) as error:
                del self._pending[request_id]
                request.fail(error)
        self._enter("ready")

    def _note_deadly_load(self, name: str) -> None:
        """A model that ends each engine that loads it must not keep the others from being served."""
        self._num_deadly_loads[name] += 1
        if self._num_deadly_loads[name] >= _MAX_DEADLY_LOADS:
            self._loads.pop(name, None)
            del self._num_deadly_loads[name]
            logger.error("loading %s again ended %d engines; it is left out", name, _MAX_DEADLY_LOADS)

    def _fail_pending(self, error: EdgerunError) -> None:
        for request in self._take_pending():
            request.fail(error)

    def _take_pending(self) -> list[Call | Generation]:
        pending, self._pending = list(self._pending.values()), {}
        return pending


async def _end_when_stuck(process: EngineProcess, watch: Watch) -> None:
    while not watch.verdict:
        await asyncio.sleep(watch.interval_s)
        if watch.turn():
            process.channel.send(Ping())
    logger.error("the engine process %d is stuck (%s) and is killed", process.pid, watch.verdict)
    await process.end_stuck()


def _how_it_ended(status: int, stuck: str) -> str:
    """What the process did, for a sentence that begins with it. stuck: why it had to be killed, or ""."""
    if stuck:
        return f"stopped answering ({stuck}) and was killed"
    if status == -signal.SIGKILL:
        return "died (it was killed by signal 9; the system may have run out of memory)"
    if status < 0:
        return f"died (signal {-status})"
    return f"died (exit status {status})"


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
