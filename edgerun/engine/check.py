"""Try a model file in a throw-away child first: a bad one costs an error message, not the engine.

`python -m edgerun.engine.check` is the child: it reads a CheckRequest as JSON on stdin, loads the model, runs
it once, prints a CheckResult as JSON and exits. `check_model` is the parent's side; what passed is remembered
by file, size and time of change, so that a known model starts without it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from edgerun import __version__, paths
from edgerun.engine.messages import Failed, Load, Start
from edgerun.errors import ModelLoadFailed
from edgerun.repository.spec import ModelSpec

logger = logging.getLogger(__name__)


class CheckRequest(msgspec.Struct, frozen=True):
    spec: ModelSpec
    start: Start


class CheckResult(msgspec.Struct, frozen=True):
    """failure None: the model loaded and ran once."""

    failure: Failed | None = None


class CheckedModels:
    """Which files passed before, in one small JSON file under the cache (safe to delete)."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or paths.cache_dir() / "checked-models.json"

    def key(self, request: CheckRequest) -> str:
        """Changes with anything that could change the verdict. Raises ModelLoadFailed without the file."""
        spec, start = request.spec, request.start
        provider = start.llm_provider if spec.kind == "llm" else start.vision_provider
        file = Path(spec.path)
        try:
            stat = file.stat()
        except OSError as error:
            raise ModelLoadFailed(
                f"the file of {spec.name} cannot be read ({error}); pull or add the model again",
                name=spec.name,
            ) from error
        parts = (
            __version__,
            str(file),
            stat.st_size,
            stat.st_mtime_ns,
            provider,
            start.lib_dir,
            msgspec.json.encode(spec.llm if spec.kind == "llm" else spec.vision).decode(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def knows(self, key: str) -> bool:
        return key in self._read()

    def remember(self, key: str) -> None:
        known = [*self._read(), key][-200:]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(known))
            temporary.replace(self._path)
        except OSError as error:
            logger.warning("cannot remember checked models in %s: %s", self._path, error)

    def _read(self) -> list[str]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[str])
        except (OSError, msgspec.DecodeError):
            return []


async def check_model(spec: ModelSpec, start: Start, checked: CheckedModels) -> None:
    """Returns when the model loads and runs in a child (or did before). Raises what the child raised, or
    ModelLoadFailed when the child was ended by a signal."""
    request = CheckRequest(spec, start)
    key = checked.key(request)
    if checked.knows(key):
        return
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "edgerun.engine.check",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await child.communicate(msgspec.json.encode(request))
    finally:
        if child.returncode is None:  # cancelled
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise ModelLoadFailed(
            f"{spec.path} made the loader end {_how(child.returncode or 0)}; the file is damaged or "
            f"this build cannot run it{_last_line(errors)}",
            name=spec.name,
        )
    result = msgspec.json.decode(output, type=CheckResult)
    if result.failure is not None:
        raise result.failure.error()
    checked.remember(key)


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"by signal {signal.Signals(-returncode).name}"
    return f"with exit status {returncode}"


def _last_line(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return f" (it said: {lines[-1][:200]})" if lines else ""


def _try_model(request: CheckRequest) -> None:
    from edgerun.engine.models import open_llm, open_vision
    from edgerun.llm.llama_api import LlamaLibrary
    from edgerun.llm.loop import EngineLoop

    load = Load(request_id=0, spec=request.spec)
    if request.spec.kind == "llm":
        library = LlamaLibrary(Path(request.start.lib_dir) if request.start.lib_dir else None)
        loop = EngineLoop(lambda _error: os._exit(70))
        loop.start()
        open_llm(load, request.start, library, loop, lambda _message: None)
    else:
        open_vision(load, request.start, lambda _message: None)


def main() -> None:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a native library that prints must not garble it
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckRequest)
    try:
        _try_model(request)
        result = CheckResult()
    except Exception as error:  # whatever it is, the parent tells the user
        result = CheckResult(Failed.of(0, error))
    answer.write(msgspec.json.encode(result))
    answer.flush()
    os._exit(0)  # threads of the model may still be inside native code


if __name__ == "__main__":
    main()
