"""The server's life: take the addresses, probe, start the engine, load, answer, drain, leave.

Owns the order of things and the signals. Prints nothing: the command line hands in how to announce and how to
show progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from edgerun.device.probe import llm_flavour
from edgerun.device.report import DeviceReport
from edgerun.engine.messages import Start
from edgerun.errors import NativeLibraryMissing, ServerStartError
from edgerun.repository.repository import Repository
from edgerun.repository.spec import ModelKind
from edgerun.server.app import create_app
from edgerun.server.clients import PeerProtocol
from edgerun.server.engine import Engine
from edgerun.server.jobs import ReportProgress
from edgerun.server.metrics import ServerMetrics
from edgerun.server.middleware import AccessRules, ApiKeys
from edgerun.server.models import DEFAULT_MODELS, ModelManager
from edgerun.server.socket import Listener, is_loopback, open_listeners
from edgerun.server.state import AppState, Readiness

logger = logging.getLogger(__name__)

# From the signal to the exit 10 s at most: streams may end by themselves, then they are ended.
_DRAIN_S = 7.0
_STOP_ENGINE_S = 2.0
_CLOSE_S = 1.0
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they close first


class ShowProgress(Protocol):
    """Shows a step that takes long; `what` says what it is about (edgerun.cli.output.progress)."""

    def __call__(self, what: str, *, in_bytes: bool = False) -> AbstractContextManager[ReportProgress]: ...


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What `edgerun serve` was asked for. port: None for no TCP, 0 for any free one."""

    socket: Path
    host: str = "127.0.0.1"
    port: int | None = 8484
    models: tuple[str, ...] = ()  # names or weights files; none: the whole repository, default models loaded
    api_key_file: Path | None = None
    num_threads: int = 0  # of the engine; 0: decided from the device
    engine_step_timeout_s: int = 120
    is_deterministic: bool = False
    has_prefix_cache: bool = True
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of; tests put fakes here."""

    probe: Callable[[], DeviceReport]
    repository: Repository
    make_engine: Callable[[DeviceReport, ServeSettings], Engine]


class Server:
    """One server: `serve` runs it, `stop` ends it. Belongs to one event loop."""

    def __init__(
        self, settings: ServeSettings, parts: Parts, announce: Callable[[str], None], progress: ShowProgress
    ) -> None:
        """announce takes the ready line."""
        self._settings = settings
        self._parts = parts
        self._announce = announce
        self._progress = progress
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    async def serve(self) -> None:
        """Runs until `stop`, then returns. Raises EdgerunError when it cannot start."""
        settings = self._settings
        rules = access_rules(settings)
        with (
            open_listeners(settings.socket, settings.host, settings.port) as listeners,
            ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pictures") as image_pool,
        ):
            device = await self._unless_stopped(asyncio.to_thread(self._parts.probe))
            if device is None:
                return
            engine = self._parts.make_engine(device, settings)
            models = ModelManager(self._parts.repository, engine, device)
            state = AppState(engine, models, device, ServerMetrics(), Readiness(), image_pool)
            async with self._http(create_app(state, rules), listeners, state):
                await self._unless_stopped(self._start_up(state))
                if not self._stopping.is_set():
                    state.readiness.reason = ""
                    self._announce("ready " + " ".join(listener.address for listener in listeners))
                    await self._stopping.wait()
                    state.readiness.reason = "the server is stopping"

    def stop(self) -> None:
        """Once: let streams end, for some seconds. Twice: end them now."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def _start_up(self, state: AppState) -> None:
        """The models first: what is missing is fetched while nobody waits for an engine."""
        specs = []
        for name in self._settings.models or DEFAULT_MODELS:
            state.readiness.reason = f"fetching {name}"
            with self._progress(name, in_bytes=True) as report:
                specs.append(await state.models.fetch(name, report))
        if self._settings.models:
            state.models.serve_only(specs)
        state.readiness.reason = "starting the engine"
        await state.engine.start()
        for spec in specs:
            state.readiness.reason = f"loading {spec.name}"
            with self._progress(spec.name) as report:
                await state.models.load(spec.name, report)

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, or None when the server is stopped first; then the work is cancelled."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    @asynccontextmanager
    async def _http(self, app: FastAPI, listeners: list[Listener], state: AppState) -> AsyncIterator[None]:
        """Answer on `listeners` inside; on leaving, drain, and stop the engine."""
        http = _Http(_http_config(app))
        serving = asyncio.create_task(http.serve([listener.socket for listener in listeners]), name="http")
        try:
            yield
        finally:
            state.models.close()
            http.should_exit = True  # no new connections; the running requests go on
            await self._drain(serving)
            await _stop_engine(state.engine)  # what still runs ends with an error of its own
            await asyncio.wait({serving}, timeout=_CLOSE_S)
            http.force_exit = True  # a client that does not read its answer
            await asyncio.wait({serving}, timeout=_CLOSE_S)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({serving, hurry}, timeout=_DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: `Server` decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _http_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=PeerProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )


async def _stop_engine(engine: Engine) -> None:
    pid = engine.pid
    try:
        await asyncio.wait_for(engine.stop(), _STOP_ENGINE_S)
    except asyncio.TimeoutError:
        logger.warning("the engine did not stop within %.0f s and is killed", _STOP_ENGINE_S)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def access_rules(settings: ServeSettings) -> AccessRules:
    """Who may ask over TCP. Raises ConfigError for unreadable keys, ServerStartError for missing ones."""
    keys = ApiKeys.read(settings.api_key_file) if settings.api_key_file else None
    host = settings.host
    if settings.port is None or is_loopback(host):
        # 127.0.0.2 is loopback too, and then a name of this server.
        return AccessRules(frozenset({*(AccessRules().hosts or ()), host.lower()}), keys)
    if keys is None:
        raise ServerStartError(
            f"listening on {host} lets other machines in, so it needs API keys: "
            "write one a line into a file and give it with --api-key-file"
        )
    # Which names lead here from outside is not for us to know; who has a key may use any.
    return AccessRules(None, keys)


def make_engine(device: DeviceReport, settings: ServeSettings) -> Engine:
    """The engine process with the providers that the probe chose."""
    from edgerun.engine.client import EngineClient

    return EngineClient(
        start_message(device, settings),
        log_level=settings.log_level.upper(),
        step_timeout_s=settings.engine_step_timeout_s,
    )


def start_message(device: DeviceReport, settings: ServeSettings) -> Start:
    llm, vision = device.chosen("llm"), device.chosen("vision")
    lib_dir, llm_reason = "", llm.reason if llm else _why_none(device, "llm")
    if llm is not None:
        try:
            lib_dir = str(llm_flavour(device, llm.provider).path.resolve())
        except NativeLibraryMissing as error:
            llm, llm_reason = None, error.message
    return Start(
        lib_dir=lib_dir,
        llm_provider=llm.provider if llm else "",
        llm_reason=llm_reason,
        vision_provider=vision.provider if vision else "",
        vision_reason=vision.reason if vision else _why_none(device, "vision"),
        num_threads=settings.num_threads or device.cpu.cores_usable,
        deterministic=settings.is_deterministic,
        prefix_cache=settings.has_prefix_cache,
    )


def _why_none(device: DeviceReport, kind: ModelKind) -> str:
    return "; ".join(f"{choice.provider}: {choice.reason}" for choice in device.choices(kind))
