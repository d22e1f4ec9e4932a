"""The engine process: everything that runs a model, and nothing else.

The main thread reads messages and never waits for a model. Loading and unloading happen on one thread of
their own; each loaded model brings its own threads. When the server is gone the process ends.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import queue
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TypeVar

from edgerun import log
from edgerun.engine.channel import EngineChannel
from edgerun.engine.messages import (
    Abort,
    Failed,
    GetStats,
    Infer,
    Load,
    Loaded,
    Message,
    Ping,
    Pong,
    Progress,
    Ready,
    Shutdown,
    Start,
    Stats,
    Submit,
    ToEngine,
    Tokenize,
    Unload,
    Unloaded,
)
from edgerun.engine.models import open_llm, open_vision
from edgerun.errors import ModelNotFound
from edgerun.llm.llama_api import LlamaLibrary
from edgerun.llm.loop import EngineLoop
from edgerun.llm.worker import LlmWorker
from edgerun.vision.worker import VisionWorker

logger = logging.getLogger(__name__)

_W = TypeVar("_W", LlmWorker, VisionWorker)
_EXIT_FATAL = 70  # EX_SOFTWARE: a step failed and the native state is unknown
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Engine:
    """Owns the loaded models: the loader thread changes the two tables, the main thread reads them."""

    def __init__(self, channel: EngineChannel, start: Start) -> None:
        self._channel, self._start = channel, start
        self._llms: dict[str, LlmWorker] = {}
        self._visions: dict[str, VisionWorker] = {}
        self._library: LlamaLibrary | None = None
        self._loop = EngineLoop(_die)
        self._load_began_s = 0.0  # time.monotonic(); 0.0: none runs. Written by the loader thread alone
        self._loads: queue.SimpleQueue[Load | Unload] = queue.SimpleQueue()
        self._loader = threading.Thread(target=self._run_loader, name="loader", daemon=True)

    def run(self) -> None:
        """Serve until Shutdown or until the server is gone. What still loads or computes is left to the end
        of the process: the server has drained, and a step or a load may take many seconds."""
        self._loop.start()
        self._loader.start()
        self._channel.send(Ready(pid=os.getpid()))
        while (message := self._channel.receive()) is not None and not isinstance(message, Shutdown):
            self._dispatch(message)

    def _dispatch(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            if worker := self._find(self._llms, message):
                worker.submit(message)
        elif isinstance(message, Infer):
            if vision := self._find(self._visions, message):
                vision.submit(message)
        elif isinstance(message, Tokenize):
            if worker := self._find(self._llms, message):
                worker.tokenize(message)
        elif isinstance(message, Abort):
            for worker in tuple(self._llms.values()):
                worker.abort(message.request_id)
        elif isinstance(message, Load | Unload):
            self._loads.put(message)
        elif isinstance(message, GetStats):
            self._send_stats(message.request_id)
        elif isinstance(message, Ping):
            began_s = self._load_began_s
            load_age_s = time.monotonic() - began_s if began_s else 0.0
            self._channel.send(Pong(step_age_s=self._loop.step_age_s, load_age_s=load_age_s))

    def _find(self, workers: dict[str, _W], message: Submit | Infer | Tokenize) -> _W | None:
        worker = workers.get(message.model)
        if worker is None:
            error = ModelNotFound(
                f"the model {message.model!r} is not loaded in the engine", name=message.model
            )
            self._channel.send(Failed.of(message.request_id, error))
        return worker

    def _send_stats(self, request_id: int) -> None:
        self._channel.send(
            Stats(
                request_id=request_id,
                llm={name: worker.stats() for name, worker in tuple(self._llms.items())},
                vision={name: worker.stats() for name, worker in tuple(self._visions.items())},
            )
        )

    # ---- the loader thread

    def _run_loader(self) -> None:
        while True:
            message = self._loads.get()
            self._load_began_s = time.monotonic()
            try:
                if isinstance(message, Load):
                    self._channel.send(self._load(message))
                else:
                    self._channel.send(self._unload(message))
            except Exception as error:  # one bad model must not end the engine
                if not isinstance(error, OSError):
                    logger.warning("%s", error)
                self._channel.send(Failed.of(message.request_id, error))
            finally:
                self._load_began_s = 0.0

    def _load(self, message: Load) -> Loaded:
        spec = message.spec

        def progress(done: int, total: int) -> None:
            self._channel.send(Progress(request_id=message.request_id, stage="load", done=done, total=total))

        if spec.kind == "llm":
            if self._library is None:
                self._library = LlamaLibrary(Path(self._start.lib_dir) if self._start.lib_dir else None)
            llm, loaded = open_llm(
                message, self._start, self._library, self._loop, self._channel.send, progress
            )
            # The new one takes requests before the old one goes, so that none is refused.
            old_llm, self._llms[spec.name] = self._llms.get(spec.name), llm
            if old_llm is not None:
                old_llm.close()
        else:
            vision, loaded = open_vision(message, self._start, self._channel.send)
            old_vision, self._visions[spec.name] = self._visions.get(spec.name), vision
            if old_vision is not None:
                old_vision.close(runs_waiting=True)
        return loaded

    def _unload(self, message: Unload) -> Message:
        found = self._llms.pop(message.model, None) or self._visions.pop(message.model, None)
        if found is None:
            raise ModelNotFound(f"the model {message.model!r} is not loaded", name=message.model)
        found.close()
        return Unloaded(request_id=message.request_id, model=message.model)


def _die(error: BaseException) -> None:
    """A step failed: llama.cpp's state is unknown, so the process goes and the supervisor makes a new one."""
    os._exit(_EXIT_FATAL)


def _die_with_parent() -> None:
    """The kernel ends us when the server dies, even from kill -9 in the middle of a native call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m edgerun.engine.main")
    parser.add_argument("--fd", type=int, required=True, help="our end of the socketpair")
    parser.add_argument("--log-level", default="WARNING")
    args = parser.parse_args()
    log.setup(args.log_level)
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle: it drains first
    channel = EngineChannel(socket.socket(fileno=args.fd))
    status = _EXIT_FATAL
    try:
        start = channel.receive()
        if isinstance(start, Start):
            Engine(channel, start).run()
        status = 0
    except Exception:
        logger.exception("the engine process ends")
    finally:
        # Threads may be inside native code, which crashes when Python is taken down around it; the operating
        # system frees what they hold.
        os._exit(status)


if __name__ == "__main__":
    main()
