"""Starting and ending one engine process. Knows nothing of requests (see client.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

from edgerun.engine.channel import ServerChannel
from edgerun.engine.messages import Failed, Ready, Shutdown, Start
from edgerun.errors import EngineLost

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 5.0
# How often a thread of ggml looks before it sleeps at a barrier; there are hundreds in each token. Sleeping
# at once decodes 32 tokens/s on two idle cores and 46 beside a busy program, 20,000 looks 113 and 14; this
# 113 and 23 (SmolLM2-135M, 2 threads, tests/benchmarks/RESULTS.md). GOMP is gcc's OpenMP; whoever sets the
# variable knows better.
OPENMP_ENV = {"GOMP_SPINCOUNT": "5000"}


class EngineProcess:
    """A running engine: its channel, its pid, its end."""

    def __init__(self, process: asyncio.subprocess.Process, channel: ServerChannel) -> None:
        self._process, self.channel = process, channel

    @classmethod
    async def launch(cls, start: Start, log_level: str) -> EngineProcess:
        """Spawn it and wait until it takes requests. Raises EngineLost when it does not come up; no process
        is left then, nor when the caller is cancelled."""
        try:
            engine = await cls._spawn(log_level)
        except OSError as error:  # no memory for a fork, or too many open files
            raise EngineLost(f"the engine process cannot be started: {error}") from error
        is_up = False
        try:
            engine.channel.send(start)
            try:
                first = await asyncio.wait_for(engine.channel.receive(), _START_TIMEOUT_S)
            except asyncio.TimeoutError:
                first = None
            is_up = isinstance(first, Ready)
        finally:
            if not is_up:
                engine.kill()
                status = await engine.reap()
        if is_up:
            return engine
        detail = first.message if isinstance(first, Failed) else f"exit status {status}"
        raise EngineLost(f"the engine process did not start ({detail}); run: edgerun doctor")

    @classmethod
    async def _spawn(cls, log_level: str) -> EngineProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "edgerun.engine.main",
                    f"--fd={theirs.fileno()}",
                    f"--log-level={log_level}",
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,  # the server's stdout has one reader and one line
                    env={**OPENMP_ENV, **os.environ},
                    start_new_session=True,  # Ctrl-C goes to the server, which drains first
                )
            ours.setblocking(False)
            return cls(process, await ServerChannel.over(ours))
        except BaseException:
            ours.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def reap(self, timeout_s: float = 1.0) -> int:
        """Wait for its end, make it end after timeout_s, close the channel. The exit status, negative for a
        signal."""
        try:
            # Not kill() at once: Popen.kill polls, which takes the exit status away from asyncio.
            status = await asyncio.wait_for(self._process.wait(), timeout_s)
        except asyncio.TimeoutError:
            self.kill()
            status = await self._wait_for_the_kernel()
        await self.channel.close()
        return status

    async def _wait_for_the_kernel(self) -> int:
        """A killed process ends at once, unless a device driver holds it: then it is left behind."""
        try:
            return await asyncio.wait_for(self._process.wait(), _KILL_TIMEOUT_S)
        except asyncio.TimeoutError:
            logger.error("process %d was killed and does not end; a device driver holds it", self.pid)
            return -signal.SIGKILL

    async def end_stuck(self) -> None:
        """Kill it, and make the reader of its channel go on even when it does not end."""
        self.kill()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _KILL_TIMEOUT_S)
        self.channel.hang_up()

    async def stop(self) -> None:
        """Ask it to leave, then make it."""
        self.channel.send(Shutdown())
        await self.reap(_STOP_TIMEOUT_S)
