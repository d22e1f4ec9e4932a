"""The messages between the server process and the engine process.

Frozen structs, msgpack on the wire (see channel.py for the framing). `request_id` is chosen by the server
and is unique for the life of the engine. Every Submit, Infer, Load, Unload, Tokenize and GetStats gets
exactly one final message: Finished in Tokens / Failed / the reply of its kind.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edgerun.errors import Detail, EdgerunError, from_wire
from edgerun.repository.spec import ModelSpec
from edgerun.text.prompt import Prompt

FinishReason = Literal["stop", "length", "abort"]


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the struct's name is the tag on the wire."""


class RequestMessage(Message, frozen=True):
    """A message that belongs to one request."""

    request_id: int


# ---- server to engine


class Start(Message, frozen=True):
    """First message to a new engine; answered by Ready, or Failed with request_id 0.

    The providers are the probe's choice. lib_dir: the folder of libllama (see edgerun.native); "" when no
    LLM can run here, then `llm_reason` says why.
    """

    lib_dir: str
    llm_provider: str  # "cpu" | "cuda" | "" (none usable)
    llm_reason: str
    vision_provider: str  # "CPUExecutionProvider" | "CUDAExecutionProvider" | ... | "" (none usable)
    vision_reason: str
    num_threads: int
    deterministic: bool = False
    prefix_cache: bool = True


class LlmTuning(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured to be fastest for one model on one device (see llm/tuning.py).

    trials: one readable line for each combination that was tried, the chosen one first. was_busy: other
    programs ran meanwhile, or the time was too short, so it is worth measuring again.
    """

    kv_layout: Literal["unified", "streams"]
    flash_attention: bool
    num_threads: int
    trials: tuple[str, ...] = ()
    was_busy: bool = False


class Submit(RequestMessage, frozen=True):
    """Generate from `prompt` with a loaded LLM. Answered by Accepted or Failed, then Tokens."""

    model: str
    prompt: Prompt


class Abort(RequestMessage, frozen=True):
    """Stop a Submit. Unknown or finished ids are ignored. The request ends with finish_reason "abort"."""


class Infer(RequestMessage, frozen=True):
    """Run one preprocessed picture through a loaded vision model. Answered by Inferred or Failed.

    data: one input without the batch axis, C order, of `shape` and numpy `dtype`.
    """

    model: str
    data: bytes
    shape: tuple[int, ...]
    dtype: str


class Tokenize(RequestMessage, frozen=True):
    """Answered by Tokenized or Failed."""

    model: str
    prompt: Prompt


class Load(RequestMessage, frozen=True):
    """Load a model. Any number of Progress, then Loaded or Failed. Loading a loaded name replaces it.

    tuning: for a language model, what was measured; None decides without.
    """

    spec: ModelSpec
    tuning: LlmTuning | None = None


class Unload(RequestMessage, frozen=True):
    """Drop a model; its running requests end with Failed (EngineLost). Answered by Unloaded or Failed."""

    model: str


class GetStats(RequestMessage, frozen=True):
    """Answered by Stats."""


class Ping(Message, frozen=True):
    """Answered by Pong at once, whatever the models do."""


class Shutdown(Message, frozen=True):
    """Leave the main loop and exit 0. The server has drained before."""


# ---- engine to server


class Ready(Message, frozen=True):
    """First message after start: the engine takes requests (no model is loaded yet)."""

    pid: int


class Pong(Message, frozen=True):
    """What the engine is in the middle of, and since when, in seconds; 0: nothing of the kind.

    step_age_s: a step of a language model, or another short piece of work on its thread. load_age_s: a load
    or an unload; what that runs on the thread of the steps counts here alone.
    """

    step_age_s: float
    load_age_s: float


class Accepted(RequestMessage, frozen=True):
    """The prompt is tokenised, fits and is queued."""

    num_prompt_tokens: int


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one request got in one step. finish_reason is None while it runs."""

    request_id: int
    token_ids: list[int]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None


class Tokens(Message, frozen=True):
    """All outputs of one step, one message."""

    outputs: list[TokenOutput]


class Inferred(RequestMessage, frozen=True):
    """Outputs of one picture. Times in milliseconds; batch_size is that of the batch it ran in."""

    outputs: list[OutputTensor]
    provider: str
    queue_ms: float
    infer_ms: float
    batch_size: int


class OutputTensor(msgspec.Struct, frozen=True, array_like=True):
    """One output without the batch axis, C order."""

    name: str
    data: bytes
    shape: tuple[int, ...]
    dtype: str


class Tokenized(RequestMessage, frozen=True):
    """The answer to Tokenize."""

    token_ids: list[int]


class Progress(RequestMessage, frozen=True):
    """stage: "check", "load", "warm-up"; done of total, in the stage's own unit (total 0: unknown)."""

    stage: str
    done: int
    total: int


class LlmInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the server must know of a loaded LLM. pieces[i]: the bytes of token i (b"" for control tokens)."""

    architecture: str
    max_model_len: int
    max_num_seqs: int
    num_kv_tokens: int
    kv_layout: Literal["unified", "streams"]
    flash_attention: bool
    num_threads: int
    prefix_cache: bool
    prefix_cache_reason: str  # why it is off; "" while it is on
    chat_template: str
    bos_text: str
    eos_text: str
    add_bos: bool
    eog_token_ids: list[int]
    special_texts: list[str]  # texts of the control tokens: what a template may write and a user may not
    pieces: list[bytes]


class VisionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the server must know of a loaded vision model. shapes: -1 where the axis is free."""

    input_name: str
    input_shape: tuple[int, ...]
    input_dtype: str
    output_names: list[str]
    num_classes: int


class Loaded(RequestMessage, frozen=True):
    """provider: really in use, e.g. "cpu", "cuda", "CPUExecutionProvider"; reason: why that one."""

    model: str
    version: int
    provider: str
    reason: str
    size_bytes: int  # memory that the model took: weights, KV pool, buffers; an estimate where not known
    llm: LlmInfo | None = None
    vision: VisionInfo | None = None


class Unloaded(RequestMessage, frozen=True):
    """The answer to Unload."""

    model: str


class LlmStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters only rise while the engine lives; gauges are of this moment."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_blocks: int
    num_free_blocks: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    preemptions_total: int
    steps_total: int
    prefix_misses: dict[str, int] = {}  # requests by the reason for which nothing, or not all, was reused
    num_parked: int = 0  # ended sequences whose cells are kept for whoever asks the same
    num_swapped: int = 0  # preempted sequences that wait in host memory
    swap_bytes: int = 0
    swaps_total: int = 0
    recomputes_total: int = 0
    kv_waste: float = 0.0  # share of the held cells that nothing was written to
    step_ms: float = 0.0  # what a step with decodes alone takes now
    prefill_tokens_per_s: float = 0.0


class VisionStats(msgspec.Struct, frozen=True, kw_only=True):
    """Triton's counters: inference_count pictures in execution_count batches."""

    inference_count: int
    execution_count: int
    failure_count: int
    pending: int
    queue_us: int
    infer_us: int


class Stats(RequestMessage, frozen=True):
    llm: dict[str, LlmStats]
    vision: dict[str, VisionStats]


class Failed(RequestMessage, frozen=True):
    """The one final message of a request that went wrong. kind: a class name of edgerun.errors."""

    kind: str
    message: str
    details: dict[str, Detail] = {}

    @classmethod
    def of(cls, request_id: int, error: Exception) -> Failed:
        """From any exception; one that is not ours becomes an EdgerunError with its type in the message."""
        if isinstance(error, EdgerunError):
            return cls(
                request_id=request_id,
                kind=type(error).__name__,
                message=error.message,
                details=dict(error.details),
            )
        text = f"{type(error).__name__}: {error}"
        return cls(request_id=request_id, kind="EdgerunError", message=text)

    def error(self) -> EdgerunError:
        return from_wire(self.kind, self.message, self.details)


ToEngine = Start | Submit | Abort | Infer | Tokenize | Load | Unload | GetStats | Ping | Shutdown
FromEngine = (
    Ready | Pong | Accepted | Tokens | Inferred | Tokenized | Progress | Loaded | Unloaded | Stats | Failed
)
