"""A scripted engine, a repository in memory and a machine without a GPU.

The language model `parrot` has one token for each byte and says `engine.answer`; the vision model `rgb` names
the strongest colour of a picture.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from edgerun.device.report import CpuInfo, DeviceReport, MemoryInfo, ProviderChoice
from edgerun.engine.messages import (
    Inferred,
    LlmInfo,
    LlmStats,
    Loaded,
    OutputTensor,
    Progress,
    Stats,
    TokenOutput,
    VisionInfo,
    VisionStats,
)
from edgerun.errors import (
    ContextLengthExceeded,
    EdgerunError,
    EngineLost,
    ModelNotFound,
    ModelNotPulled,
    PullFailed,
)
from edgerun.repository.entries import ModelEntry
from edgerun.repository.spec import ModelSpec, PreprocessSpec, VisionSettings
from edgerun.text.prompt import Prompt

EOS = 256
PIECES = [bytes([value]) for value in range(256)] + [b""]
MAX_MODEL_LEN = 4096
LLM_SPEC = ModelSpec("parrot", "llm", 1, "/models/parrot.gguf", "", 1000)
VISION_SPEC = ModelSpec(
    "rgb",
    "vision",
    3,
    "/models/rgb.onnx",
    "",
    171,
    labels=("red", "green", "blue"),
    vision=VisionSettings(preprocess=PreprocessSpec(width_px=8, height_px=8)),
)
LLM_INFO = LlmInfo(
    architecture="bytes",
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=4,
    num_kv_tokens=4 * MAX_MODEL_LEN,
    kv_layout="unified",
    flash_attention=True,
    num_threads=2,
    prefix_cache=True,
    prefix_cache_reason="",
    chat_template="",
    bos_text="",
    eos_text="<|im_end|>",
    add_bos=False,
    eog_token_ids=[EOS],
    special_texts=["<|im_start|>", "<|im_end|>"],
    pieces=PIECES,
)
VISION_INFO = VisionInfo(
    input_name="x", input_shape=(-1, 3, 8, 8), input_dtype="float32", output_names=["y"], num_classes=3
)


def device_report() -> DeviceReport:
    """A machine without a GPU."""
    return DeviceReport(
        board=None,
        soc=None,
        jetpack=None,
        l4t=None,
        cuda=None,
        tensorrt=None,
        power_mode=None,
        cpu=CpuInfo("a CPU", "x86_64", 2, 2, 2, None, ()),
        memory=MemoryInfo(2**33, 2**32, False),
        providers=(
            ProviderChoice("llm", "cuda", False, "no NVIDIA GPU found"),
            ProviderChoice("llm", "cpu", True, "it ran", is_usable=True),
            ProviderChoice("vision", "CPUExecutionProvider", True, "it ran", is_usable=True),
        ),
    )


class FakeGeneration:
    """Says the engine's answer, one step at a time."""

    def __init__(self, engine: FakeEngine, prompt: Prompt, num_prompt_tokens: int) -> None:
        self._engine = engine
        self._steps = engine.steps_for(prompt)
        self.num_prompt_tokens = num_prompt_tokens
        self.is_cancelled = False
        engine.running.add(self)

    def __aiter__(self) -> AsyncIterator[TokenOutput]:
        return self

    async def __anext__(self) -> TokenOutput:
        engine = self._engine
        if self not in engine.running:
            raise StopAsyncIteration
        if engine.gate is not None and engine.num_steps >= engine.steps_before_gate:
            await engine.gate.wait()
        else:
            await asyncio.sleep(engine.step_s)
        if engine.crash_after_steps is not None and engine.num_steps >= engine.crash_after_steps:
            engine.running.discard(self)
            raise EngineLost("the engine process died; ask again")
        engine.num_steps += 1
        token_ids, reason = next(self._steps)
        if reason is not None:
            engine.running.discard(self)
        return TokenOutput(1, token_ids, engine.num_cached_tokens, reason)

    def take_all(self) -> list[TokenOutput]:
        return []

    def cancel(self) -> None:
        self.is_cancelled = True
        if self in self._engine.running:
            self._engine.running.discard(self)
            self._engine.num_cancelled += 1


@dataclass(eq=False)
class FakeEngine:
    """Everything a test may script is an attribute."""

    answer: bytes = b"An oak, a birch and a fir."
    is_endless: bool = False  # begin the answer again and again
    tokens_per_step: int = 1
    step_s: float = 0.0
    num_cached_tokens: int = 0
    gate: asyncio.Event | None = None  # steps wait for it, after steps_before_gate of them
    steps_before_gate: int = 0
    crash_after_steps: int | None = None
    error_on_generate: EdgerunError | None = None
    error_on_load: EdgerunError | None = None
    error_on_infer: EdgerunError | None = None
    stats_s: float = 0.0
    stats_now: Stats | None = None
    pid: int | None = 4711
    state: str = "ready"
    stuck: str = ""  # what is wrong with an engine that runs
    loaded: dict[str, Loaded] = field(default_factory=dict)
    running: set[FakeGeneration] = field(default_factory=set)
    prompts: list[Prompt] = field(default_factory=list)
    loads: list[ModelSpec] = field(default_factory=list)
    num_steps: int = 0
    num_cancelled: int = 0
    load_gate: asyncio.Event | None = None

    @property
    def trouble(self) -> str:
        return self.stuck if self.state == "ready" else f"the engine is {self.state}"

    async def start(self) -> None:
        self.state = "ready"

    async def stop(self) -> None:
        self.state = "stopped"

    async def load(self, spec: ModelSpec, on_progress: Callable[[Progress], None] | None = None) -> Loaded:
        self.loads.append(spec)
        if on_progress is not None:
            on_progress(Progress(request_id=1, stage="load", done=1, total=2))
        if self.load_gate is not None:
            await self.load_gate.wait()
        if self.error_on_load is not None:
            raise self.error_on_load
        loaded = loaded_of(spec)
        self.loaded[spec.name] = loaded
        return loaded

    async def unload(self, name: str) -> None:
        del self.loaded[name]

    async def generate(self, model: str, prompt: Prompt) -> FakeGeneration:
        self.prompts.append(prompt)
        if self.error_on_generate is not None:
            raise self.error_on_generate
        num_tokens = len(tokens_of(prompt))
        if num_tokens >= MAX_MODEL_LEN:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens and the model's context is {MAX_MODEL_LEN} tokens",
                num_prompt_tokens=num_tokens,
                max_model_len=MAX_MODEL_LEN,
            )
        return FakeGeneration(self, prompt, num_tokens)

    def steps_for(self, prompt: Prompt) -> Iterator[tuple[list[int], str | None]]:
        limit = prompt.sampling.max_tokens or MAX_MODEL_LEN
        num_made = 0
        while True:
            for start in range(0, len(self.answer), self.tokens_per_step):
                tokens = list(self.answer[start : start + self.tokens_per_step])[: limit - num_made]
                num_made += len(tokens)
                if num_made >= limit:
                    yield tokens, "length"
                    return
                yield tokens, None
            if not self.is_endless:
                yield [], "stop"
                return

    async def tokenize(self, model: str, prompt: Prompt) -> list[int]:
        return tokens_of(prompt)

    async def infer(self, model: str, data: bytes, shape: tuple[int, ...], dtype: str) -> Inferred:
        await asyncio.sleep(self.step_s)
        if self.error_on_infer is not None:
            raise self.error_on_infer
        pixels = np.frombuffer(data, dtype=dtype).reshape(shape)  # (3, 8, 8)
        logits = (10 * pixels.mean(axis=(1, 2))).astype("float32")
        output = OutputTensor("y", logits.tobytes(), (3,), "float32")
        return Inferred(
            request_id=1,
            outputs=[output],
            provider="CPUExecutionProvider",
            queue_ms=0.5,
            infer_ms=1.5,
            batch_size=1,
        )

    async def stats(self) -> Stats:
        await asyncio.sleep(self.stats_s)
        if self.stats_now is not None:
            return self.stats_now
        return stats_of(num_running=len(self.running))


def tokens_of(prompt: Prompt) -> list[int]:
    """One token a byte, one for each control text."""
    tokens: list[int] = []
    for segment in prompt.segments:
        tokens += [EOS] if segment.special else list(segment.text.encode())
    return tokens


def loaded_of(spec: ModelSpec) -> Loaded:
    is_llm = spec.kind == "llm"
    return Loaded(
        request_id=1,
        model=spec.name,
        version=spec.version,
        provider="cpu" if is_llm else "CPUExecutionProvider",
        reason="it ran",
        size_bytes=spec.size_bytes,
        llm=LLM_INFO if is_llm else None,
        vision=None if is_llm else VISION_INFO,
    )


def stats_of(*, num_running: int = 0, hits: int = 0, pictures: int = 0) -> Stats:
    llm = LlmStats(
        num_running=num_running,
        num_waiting=0,
        max_num_seqs=4,
        num_blocks=100,
        num_free_blocks=75,
        prompt_tokens_total=0,
        generation_tokens_total=0,
        prefix_cache_queries_total=2 * hits,
        prefix_cache_hits_total=hits,
        preemptions_total=0,
        steps_total=0,
    )
    vision = VisionStats(
        inference_count=pictures,
        execution_count=pictures,
        failure_count=0,
        pending=0,
        queue_us=0,
        infer_us=0,
    )
    return Stats(request_id=1, llm={"parrot": llm}, vision={"rgb": vision})


@dataclass
class FakeRepository:
    """Models in memory. What is not in `pulled` has to be pulled first."""

    specs: dict[str, ModelSpec] = field(default_factory=lambda: {"parrot": LLM_SPEC, "rgb": VISION_SPEC})
    pulled: set[str] = field(default_factory=lambda: {"parrot", "rgb"})
    pull_gate: threading.Event | None = None
    pull_error: PullFailed | None = None
    resolved: list[str] = field(default_factory=list)

    def list(self) -> list[ModelEntry]:
        return [self.get(name) for name in sorted(self.specs)]

    def get(self, name: str) -> ModelEntry:
        if name not in self.specs:
            raise ModelNotFound(f"no model named {name!r}; there is: {', '.join(self.specs)}", name=name)
        spec = self.specs[name]
        is_pulled = name in self.pulled
        return ModelEntry(
            name,
            spec.kind,
            task="chat" if spec.kind == "llm" else "classify",
            versions=(spec.version,),
            is_pulled=is_pulled,
            active_version=spec.version if is_pulled else 0,
            size_bytes=spec.size_bytes,
        )

    def resolve(self, name: str, version: int | None = None) -> ModelSpec:
        self.resolved.append(name)
        entry = self.get(name)
        if not entry.is_pulled:
            raise ModelNotPulled(
                f"{name} is not on this machine; run `edgerun models pull {name}`", name=name
            )
        return self.specs[name]

    def pull(self, name: str, progress: Callable[[str, int, int], None]) -> ModelSpec:
        for done in range(3):
            progress("download", done, 2)
            if self.pull_gate is not None:
                assert self.pull_gate.wait(10)
        if self.pull_error is not None:
            raise self.pull_error
        self.pulled.add(name)
        return self.specs[name]

    def rollback(self, name: str) -> int:
        spec = self.specs[name]
        if spec.version == 1:
            raise ModelNotPulled(f"{name} has no earlier version on this machine", name=name)
        self.specs[name] = replace(spec, version=spec.version - 1)
        return spec.version - 1
