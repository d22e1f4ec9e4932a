"""Try a model file in a throw-away child first: a bad one costs an error message, not the engine.

`python -m edgerun.engine.check` is the child: it reads a CheckRequest as JSON on stdin, loads the model, runs
it once, prints a CheckResult as JSON and exits. A language model is also measured there (see llm/tuning.py).
`check_model` is the parent's side; what passed, and what was measured, is remembered by file, size and time
of change, so that a known model starts without it.
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
from edgerun.engine.messages import Failed, LlmTuning, Load, Start
from edgerun.engine.process import OPENMP_ENV
from edgerun.errors import ModelLoadFailed
from edgerun.repository.spec import ModelSpec

logger = logging.getLogger(__name__)

_MAX_CHECKS = 3


class CheckRequest(msgspec.Struct, frozen=True):
    spec: ModelSpec
    start: Start


class CheckResult(msgspec.Struct, frozen=True):
    """failure None: the model loaded and ran once. tuning: what was measured, where there was a choice."""

    failure: Failed | None = None
    tuning: LlmTuning | None = None


class CheckedModel(msgspec.Struct, frozen=True):
    """What is remembered of a file that passed. about: the file and its settings, whatever it ran on."""

    about: str
    provider: str
    tuning: LlmTuning | None = None
    num_checks: int = 1

    @property
    def is_settled(self) -> bool:
        """What was measured beside other programs is measured again at the next load, but not for ever."""
        is_doubtful = self.tuning is not None and self.tuning.was_busy
        return not is_doubtful or self.num_checks >= _MAX_CHECKS


class CheckedModels:
    """Which files passed before, in one small JSON file under the cache (safe to delete)."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or paths.cache_dir() / "checked-models.json"

    def key(self, request: CheckRequest) -> str:
        """Changes with anything that could change the verdict or what is fastest. Raises ModelLoadFailed
        without the file."""
        spec, start = request.spec, request.start
        device: tuple[object, ...] = (_provider(request), start.lib_dir)
        if spec.kind == "llm":
            device += (start.num_threads, start.deterministic)
        return _digest(_about(spec), *device)

    def find(self, key: str) -> CheckedModel | None:
        return self._read().get(key)

    def tuning_of(self, spec: ModelSpec) -> tuple[str, LlmTuning] | None:
        """What was last measured for a model as it is configured now, and on which provider."""
        try:
            about = _about(spec)
        except ModelLoadFailed:
            return None
        found = [model for model in self._read().values() if model.about == about and model.tuning]
        last = found[-1] if found else None
        return (last.provider, last.tuning) if last is not None and last.tuning is not None else None

    def remember(self, key: str, request: CheckRequest, tuning: LlmTuning | None) -> None:
        known = self._read()
        before = known.pop(key, None)  # the last one stands last
        num_checks = before.num_checks + 1 if before is not None else 1
        known[key] = CheckedModel(_about(request.spec), _provider(request), tuning, num_checks)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(dict(list(known.items())[-200:])))
            temporary.replace(self.path)
        except OSError as error:
            logger.warning("cannot remember checked models in %s: %s", self.path, error)

    def _read(self) -> dict[str, CheckedModel]:
        """Nothing where the file is missing, damaged, or of a release that measured nothing."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, CheckedModel])
        except (OSError, msgspec.DecodeError):
            return {}


def _about(spec: ModelSpec) -> str:
    file = Path(spec.path)
    try:
        stat = file.stat()
    except OSError as error:
        raise ModelLoadFailed(
            f"the file of {spec.name} cannot be read ({error}); pull or add the model again",
            name=spec.name,
        ) from error
    settings = msgspec.json.encode(spec.llm if spec.kind == "llm" else spec.vision).decode()
    return _digest(__version__, str(file), stat.st_size, stat.st_mtime_ns, settings)


def _provider(request: CheckRequest) -> str:
    start = request.start
    return start.llm_provider if request.spec.kind == "llm" else start.vision_provider


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


async def check_model(spec: ModelSpec, start: Start, checked: CheckedModels) -> LlmTuning | None:
    """Returns when the model loads and runs in a child (or did before): what was measured to be fastest, None
    where nothing was to choose. Raises what the child raised, or ModelLoadFailed when the child was ended by
    a signal."""
    request = CheckRequest(spec, start)
    key = checked.key(request)
    if (known := checked.find(key)) is not None and known.is_settled:
        return known.tuning
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "edgerun.engine.check",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**OPENMP_ENV, **os.environ},  # as the engine will run it, else other threads are measured
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
    checked.remember(key, request, result.tuning)
    return result.tuning


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"by signal {signal.Signals(-returncode).name}"
    return f"with exit status {returncode}"


def _last_line(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return f" (it said: {lines[-1][:200]})" if lines else ""


def _try_model(request: CheckRequest) -> LlmTuning | None:
    from edgerun.engine.models import open_vision, try_llm
    from edgerun.llm.llama_api import LlamaLibrary
    from edgerun.llm.loop import EngineLoop

    load = Load(request_id=0, spec=request.spec)
    if request.spec.kind == "llm":
        library = LlamaLibrary(Path(request.start.lib_dir) if request.start.lib_dir else None)
        loop = EngineLoop(lambda _error: os._exit(70))
        loop.start()
        return try_llm(load, request.start, library, loop)
    open_vision(load, request.start, lambda _message: None)
    return None


def main() -> None:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a native library that prints must not garble it
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckRequest)
    try:
        result = CheckResult(tuning=_try_model(request))
    except Exception as error:  # whatever it is, the parent tells the user
        result = CheckResult(Failed.of(0, error))
    answer.write(msgspec.json.encode(result))
    answer.flush()
    os._exit(0)  # threads of the model may still be inside native code


if __name__ == "__main__":
    main()
