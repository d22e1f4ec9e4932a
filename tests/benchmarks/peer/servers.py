"""Starting, watching and ending the two servers. Knows nothing of what is asked of them.

Each runs in a session of its own, so Ctrl-C ends this program, which then ends them in order, by their ids.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil

_START_S = 300.0  # a model of many gigabytes from a slow disk
_STOP_S = 20.0  # above the time that a server takes to drain


class ServerFailed(Exception):
    """A server that we started did not come up."""


class Server:
    """One server process with its children; a context manager. url: where it answers."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        ready_path: str,
        folder: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """ready_path: answers 200 when the model is loaded. folder: for its log; also its working folder."""
        self.name, self.command = name, tuple(command)
        self.url = f"http://127.0.0.1:{port}"
        self.model = ""
        self._ready_path = ready_path
        self._environ = {**os.environ, **(environ or {})}
        self._folder, self._log_path = folder, folder / f"{name}.log"
        self._process: psutil.Popen | None = None

    def __enter__(self) -> Server:
        with self._log_path.open("wb") as log:
            self._process = psutil.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=self._folder,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
            self.model = httpx.get(f"{self.url}/v1/models", trust_env=False).json()["data"][0]["id"]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def cpu_s(self) -> float:
        """User and system seconds so far, of the server and all its children, also those that are gone."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory by process: "server", and the last word of a child's module or program."""
        sizes: dict[str, int] = {}
        for index, process in enumerate(self._tree()):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = "server" if index == 0 else _child_name(process)
                sizes[name] = sizes.get(name, 0) + process.memory_info().rss
        return sizes

    def _tree(self) -> list[psutil.Process]:
        assert self._process is not None
        return [self._process, *self._process.children(recursive=True)]

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise ServerFailed(
                    f"{self.name} ended with status {self._process.returncode}: {self._log_end()}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + self._ready_path, trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise ServerFailed(f"{self.name} was not ready after {_START_S:.0f} s: {self._log_end()}")

    def _log_end(self) -> str:
        return self._log_path.read_text(errors="replace")[-2000:]

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself
            children = process.children(recursive=True)
            process.terminate()
        try:
            process.wait(_STOP_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _child_name(process: psutil.Process) -> str:
    words = process.cmdline()
    return "engine" if "edgerun.engine.main" in words else Path(words[0] if words else "?").name


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this program as Ctrl-C does, through every `finally`."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
