"""From what `config.toml` asks to what is done: layout, kernels, and sizes that fit the memory. Pure sums.

What the config says wins over what was measured on this device (see tuning), which wins over the default: one
pool, flash attention on. A pool without flash attention is never chosen here, since its output depends on
where the cells lie; it has to be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from edgerun.engine.messages import LlmTuning
from edgerun.errors import ModelLoadFailed
from edgerun.llm.llama_api import MAX_SEQ_IDS, STREAM_MULTIPLE, MemoryKind
from edgerun.repository.spec import LlmSettings

NO_SPARE = -1  # no sequence id is kept free

# A pool of more than this many full contexts is memory that an edge box rarely gets to use.
_FULL_CONTEXTS = 2
# The KV cache may take this share of what is free when the model loads; the rest is for compute buffers, the
# vision models and whatever starts later.
_KV_SHARE_OF_FREE = 0.25
_MIN_CONTEXT = 256  # below this a chat is not possible
# Ended sequences stay in a pool as holders of their cells, under ids of their own: so many in all for each
# that runs.
_IDS_PER_SEQUENCE = 4
_LEAST_PROMPT_TOKENS = 128  # of one step: two pieces that may not be cut further (see chunks.py)
_SWAP_SHARE_OF_FREE, _MAX_SWAP_BYTES = 0.125, 2 << 30
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Facts:
    """free_bytes: of the memory that the KV cache comes from, without what is left to the system.
    host_free_bytes: the same of main memory. num_threads: what the device would use."""

    trained_context: int
    kv_bytes_per_token: int
    memory_kind: MemoryKind
    free_bytes: int
    host_free_bytes: int
    num_threads: int
    use_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Resolved:
    """settings: with every 0 and "auto" decided. num_seq_ids: ids 0 .. n - 1 are the scheduler's to use.
    spare_id: one more that stays empty, for save_tail and load_tail; NO_SPARE where they need none.
    prefix_cache_reason: why settings.prefix_cache is off, "" while it is on."""

    settings: LlmSettings
    num_seq_ids: int
    spare_id: int
    prefix_cache_reason: str

    @property
    def is_unified(self) -> bool:
        return self.settings.kv_layout == "unified"

    @property
    def has_flash_attention(self) -> bool:
        return self.settings.flash_attention == "on"

    @property
    def num_context_ids(self) -> int:
        """What llama.cpp must be told: the ids and the spare one."""
        return self.num_seq_ids + (self.spare_id != NO_SPARE)


@dataclass(frozen=True, slots=True)
class _Choice:
    layout: Literal["unified", "streams"]
    flash_attention: bool
    may_shrink: bool  # run fewer streams rather than take the other layout


def resolve_settings(
    asked: LlmSettings,
    facts: Facts,
    *,
    tuning: LlmTuning | None = None,
    deterministic: bool = False,
    prefix_cache: bool = True,
) -> Resolved:
    """prefix_cache: what the server was started with. Raises ModelLoadFailed with the sums."""
    if asked.kv_cache_dtype != "f16" and asked.flash_attention == "off":
        raise ModelLoadFailed(
            f'kv_cache_dtype = "{asked.kv_cache_dtype}" needs flash attention, which flash_attention = "off" '
            'forbids; set it to "auto" or "on" in the model\'s config.toml'
        )
    if deterministic:
        asked, choice = _choose_deterministic(asked, facts)
        tuning = None
    else:
        choice = _choose(asked, facts, tuning)
    layout, num_seqs, pool_tokens, max_len = _sizes(asked, facts, choice)
    if layout != choice.layout:
        choice = replace(choice, layout=layout, flash_attention=asked.flash_attention != "off")
    reason = _why_no_prefix_cache(asked, facts, choice, prefix_cache, deterministic)
    settings = replace(
        asked,
        max_model_len=max_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(asked.max_num_batched_tokens, num_seqs + _LEAST_PROMPT_TOKENS),
        num_kv_tokens=pool_tokens,
        kv_layout=choice.layout,
        flash_attention="on" if choice.flash_attention else "off",
        prefix_cache=not reason,
        swap_space_bytes=_swap_space(asked, facts),
        num_threads=asked.num_threads or (tuning.num_threads if tuning else facts.num_threads),
    )
    if choice.layout == "streams" or facts.memory_kind in ("recurrent", "hybrid"):
        return Resolved(settings, num_seqs, NO_SPARE, reason)
    num_ids = min(num_seqs * _IDS_PER_SEQUENCE, MAX_SEQ_IDS - 1)
    return Resolved(settings, num_ids, num_ids, reason)


def may_be_streams(asked: LlmSettings, facts: Facts) -> bool:
    """Whether a stream for every sequence fits, so that it is worth measuring."""
    if facts.memory_kind in (
        "recurrent",
        "window",
    ):  # one has no cells, the other cannot share between streams
        return False
    layout, *_ = _sizes(asked, facts, _Choice("streams", flash_attention=True, may_shrink=False))
    return layout == "streams"


# ---- layout and kernels


def _choose(asked: LlmSettings, facts: Facts, tuning: LlmTuning | None) -> _Choice:
    needs_flash = asked.kv_cache_dtype != "f16" or asked.flash_attention == "on"
    if asked.kv_layout == "unified":
        return _Choice("unified", asked.flash_attention != "off", may_shrink=False)
    if asked.kv_layout == "streams":
        measured = tuning.flash_attention if tuning and tuning.kv_layout == "streams" else facts.use_gpu
        has_flash = needs_flash or (measured and asked.flash_attention == "auto")
        return _Choice("streams", has_flash, may_shrink=True)
    if asked.flash_attention == "off" and facts.memory_kind != "window":
        return _Choice("streams", flash_attention=False, may_shrink=True)
    if tuning is None or tuning.kv_layout == "unified" or facts.memory_kind == "window":
        return _Choice("unified", asked.flash_attention != "off", may_shrink=False)
    return _Choice("streams", needs_flash or tuning.flash_attention, may_shrink=False)


def _choose_deterministic(asked: LlmSettings, facts: Facts) -> tuple[LlmSettings, _Choice]:
    """Where nothing that runs beside a sequence can change its output.

    On a CPU that is a stream of its own without flash attention; where that cannot be had, being alone: with
    a quantised cache, on a GPU (whose kernels depend on the batch), and where the memory is not one of plain
    cells, which was not shown to be independent of the others.
    """
    if facts.use_gpu:
        return replace(asked, max_num_seqs=1), _Choice(
            "unified", asked.flash_attention != "off", may_shrink=False
        )
    is_plain = facts.memory_kind == "plain" and asked.kv_cache_dtype == "f16"
    has_flash = asked.kv_cache_dtype != "f16" or asked.flash_attention == "on"
    if not is_plain or has_flash:
        asked = replace(asked, max_num_seqs=1)
    return asked, _Choice("streams", has_flash, may_shrink=True)


def _why_no_prefix_cache(
    asked: LlmSettings, facts: Facts, choice: _Choice, prefix_cache: bool, deterministic: bool
) -> str:
    if not prefix_cache:
        return "--no-prefix-cache"
    if not asked.prefix_cache:
        return "prefix_cache = false in its config.toml"
    if facts.memory_kind in ("recurrent", "hybrid"):
        return f"the model is {facts.memory_kind}: its memory cannot be cut back to a prefix"
    if facts.memory_kind == "window" and choice.layout == "streams":
        return "the model has a sliding window, whose beginning a copy between streams leaves out"
    if deterministic and facts.use_gpu:
        return "--deterministic on a GPU: every prompt is computed in the same way, whole"
    return ""


# ---- sizes


def _sizes(
    asked: LlmSettings, facts: Facts, choice: _Choice
) -> tuple[Literal["unified", "streams"], int, int, int]:
    """Layout, sequences that run at once, cells in all, longest context."""
    max_len = asked.max_model_len or facts.trained_context
    affordable = int(facts.free_bytes * _KV_SHARE_OF_FREE) // max(1, facts.kv_bytes_per_token)
    room = asked.num_kv_tokens or affordable
    if choice.layout == "streams":
        cells = -(-max_len // STREAM_MULTIPLE) * STREAM_MULTIPLE
        num_streams = min(asked.max_num_seqs, room // cells)
        if (
            num_streams == asked.max_num_seqs
            or choice.may_shrink
            or (asked.num_kv_tokens and num_streams >= 2)
        ):
            if num_streams == 0:  # one, as long as there is room for
                num_streams, cells = 1, room // STREAM_MULTIPLE * STREAM_MULTIPLE
            _check_room(cells, facts)
            return "streams", num_streams, num_streams * cells, min(max_len, cells)
    num_seqs = min(asked.max_num_seqs, MAX_SEQ_IDS - 1)
    pool_tokens = asked.num_kv_tokens or min(max_len * min(_FULL_CONTEXTS, num_seqs), affordable)
    pool_tokens = pool_tokens // asked.block_size * asked.block_size
    _check_room(pool_tokens, facts)
    return "unified", num_seqs, pool_tokens, min(max_len, pool_tokens)


def _check_room(num_tokens: int, facts: Facts) -> None:
    if num_tokens >= _MIN_CONTEXT:
        return
    needed = _MIN_CONTEXT * facts.kv_bytes_per_token
    raise ModelLoadFailed(
        f"the KV cache would hold {num_tokens} tokens, at least {_MIN_CONTEXT} are needed "
        f"({needed / _MIB:.0f} MiB); {facts.free_bytes / _MIB:.0f} MiB are free: close something or set "
        "num_kv_tokens in the model's config.toml"
    )


def _swap_space(asked: LlmSettings, facts: Facts) -> int:
    if facts.memory_kind == "window":  # what is saved lacks what the window has passed: see llama_sequences
        return 0
    if asked.swap_space_bytes >= 0:
        return asked.swap_space_bytes
    return min(int(facts.host_free_bytes * _SWAP_SHARE_OF_FREE), _MAX_SWAP_BYTES)
