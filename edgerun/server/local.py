"""A server for one command: a child process on a socket of its own, gone when the command ends.

The child is `edgerun serve --child`: it ends when its stdin does, so it also goes when its parent is killed.
It says on stdout either the ready line or, as one line of JSON, the error that kept it from starting.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgerun.errors import EdgerunError, ServerStartError, from_wire

_STOP_S = 15.0  # above the time that a server takes to drain
_LOG_LEVEL = "EDGERUN_LOG_LEVEL"


@contextmanager
def local_server(models: Sequence[str] = (), repositories: Sequence[Path] = ()) -> Iterator[Path]:
    """The socket of a server of our own that has loaded `models` (none: the default models).

    Its progress and log lines go to our stderr. Raises the error that keeps it from starting.
    """
    with tempfile.TemporaryDirectory(prefix="edgerun-") as folder:
        socket = Path(folder) / "edgerun.sock"
        process = subprocess.Popen(
            _command(socket, models, repositories),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={_LOG_LEVEL: "warning", **os.environ},
            start_new_session=True,  # Ctrl-C is for us; we end the child in order
        )
        try:
            wait_until_ready(process)
            yield socket
        finally:
            _stop(process)


def _command(socket: Path, models: Sequence[str], repositories: Sequence[Path]) -> list[str]:
    command = [sys.executable, "-m", "edgerun", "serve", "--child", "--no-tcp", "--socket", str(socket)]
    for name in models:
        command += ["--model", name]
    for folder in repositories:
        command += ["--model-repository", str(folder)]
    return command


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    """Return at the child's ready line; raises its error, or ServerStartError when it says nothing."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if line.startswith(b"ready "):
        return
    raise error_of(line) or ServerStartError(
        f"the server for this command ended with status {process.wait()} before it was ready; "
        "`edgerun serve` shows more"
    )


def failure_line(error: EdgerunError) -> str:
    """What the child says when it cannot start."""
    fields = {"kind": type(error).__name__, "message": error.message, "details": error.details}
    return json.dumps({"failed": fields})


def error_of(line: bytes) -> EdgerunError | None:
    """The error in a `failure_line`, or None for anything else."""
    try:
        fields = json.loads(line)["failed"]
        return from_wire(fields["kind"], fields["message"], fields["details"])
    except (ValueError, KeyError, TypeError):
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
