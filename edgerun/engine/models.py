"""Opening a model inside a process that may run one: the engine, or the throw-away child of check.py."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from edgerun.engine.messages import LlmTuning, Load, Loaded, Message, Start
from edgerun.errors import NativeLibraryMissing, ProviderUnavailable
from edgerun.llm.llama_api import LlamaLibrary
from edgerun.llm.loader import LoadedLlm, load_llm
from edgerun.llm.loop import EngineLoop
from edgerun.llm.tuning import ModelProbe, TooSlow, tune
from edgerun.llm.worker import LlmWorker
from edgerun.repository.spec import ModelSpec
from edgerun.vision.worker import VisionWorker

logger = logging.getLogger(__name__)

_CPU_VISION = "CPUExecutionProvider"
_CPU_ASKED = 'require = "cpu" in its config.toml'


def open_llm(
    message: Load,
    start: Start,
    library: LlamaLibrary,
    loop: EngineLoop,
    reply: Callable[[Message], None],
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[LlmWorker, Loaded]:
    """on_progress: percent done of 100. Raises ModelLoadFailed, ProviderUnavailable, NativeLibraryMissing."""
    provider, loaded = _load(message, start, library, on_progress)
    worker = _start_worker(loaded, loop, reply)
    spec = message.spec
    reason = start.llm_reason if provider == start.llm_provider else _CPU_ASKED
    return worker, Loaded(
        request_id=message.request_id,
        model=spec.name,
        version=spec.version,
        provider=provider,
        reason=reason,
        size_bytes=loaded.memory_bytes,
        llm=loaded.info,
    )


def try_llm(message: Load, start: Start, library: LlamaLibrary, loop: EngineLoop) -> LlmTuning | None:
    """Load it, run it once, and measure what its config leaves open; None: nothing is. Raises as open_llm."""
    _, loaded = _load(message, start, library, None)
    _start_worker(loaded, loop, lambda _message: None)
    if start.deterministic:
        return None
    asked, facts, model = message.spec.llm, loaded.facts, loaded.model
    try:
        return loop.call(lambda: tune(asked, facts, lambda layout: ModelProbe(model, asked, facts, layout)))
    except (TooSlow, RuntimeError) as error:  # the model runs; only what is fastest stays unknown
        logger.warning("%s could not be measured: %s", message.spec.name, error)
        return None


def _start_worker(loaded: LoadedLlm, loop: EngineLoop, reply: Callable[[Message], None]) -> LlmWorker:
    with ExitStack() as on_failure:
        on_failure.callback(loaded.runner.close)
        worker = LlmWorker(loaded, loop, reply)
        on_failure.pop_all()
    return worker


def _load(
    message: Load,
    start: Start,
    library: LlamaLibrary,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[str, LoadedLlm]:
    """The provider, and the model on it."""
    spec = message.spec
    if not start.llm_provider:
        raise NativeLibraryMissing(f"{spec.name} cannot run here: {start.llm_reason}", name=spec.name)
    provider = _provider_for(spec, start.llm_provider, "cpu", start.llm_reason)
    use_gpu = provider != "cpu"
    if use_gpu and not library.supports_gpu_offload():
        raise ProviderUnavailable(
            f"{spec.name}: the provider is {provider}, but the native libraries in "
            f"{start.lib_dir or 'the llama_cpp package'} were built without a GPU backend; "
            "run: edgerun doctor",
            name=spec.name,
        )
    loaded = load_llm(
        library,
        spec,
        use_gpu=use_gpu,
        num_threads=start.num_threads,
        on_progress=_whole_percents(on_progress),
        deterministic=start.deterministic,
        prefix_cache=start.prefix_cache,
        tuning=message.tuning,
    )
    return provider, loaded


def open_vision(message: Load, start: Start, reply: Callable[[Message], None]) -> tuple[VisionWorker, Loaded]:
    """Raises ModelLoadFailed, InvalidModelFile, ProviderUnavailable."""
    spec = message.spec
    if not start.vision_provider:
        raise ProviderUnavailable(f"{spec.name} cannot run here: {start.vision_reason}", name=spec.name)
    provider = _provider_for(spec, start.vision_provider, _CPU_VISION, start.vision_reason)
    reason = (
        start.vision_reason if provider == start.vision_provider else 'require = "cpu" in its config.toml'
    )
    worker = VisionWorker(spec, provider, reason, start.num_threads, reply)
    return worker, Loaded(
        request_id=message.request_id,
        model=spec.name,
        version=spec.version,
        provider=worker.provider,
        reason=worker.reason,
        size_bytes=worker.size_bytes,
        vision=worker.info,
    )


def _provider_for(spec: ModelSpec, chosen: str, cpu: str, reason: str) -> str:
    """The model's `require` against the device's choice: never a silent CPU."""
    if spec.require == "cpu":
        return cpu
    if spec.require == "gpu" and chosen == cpu:
        raise ProviderUnavailable(
            f'{spec.name} says require = "gpu" but this device would run it on the CPU: {reason}',
            name=spec.name,
        )
    return chosen


def _whole_percents(report: Callable[[int, int], None] | None) -> Callable[[float], None] | None:
    """llama.cpp reports a share for each tensor; pass on whole percents, once each."""
    if report is None:
        return None
    last = -1

    def pass_on(share: float) -> None:
        nonlocal last
        percent = int(share * 100)
        if percent != last:
            last = percent
            report(percent, 100)

    return pass_on
