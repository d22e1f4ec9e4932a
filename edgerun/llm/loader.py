"""From a model spec to a ready runner: sizes, limits and what the server must know of the model.

Runs once per load. Decides what `config.toml` left open (0) from the model and the memory of the device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil

from edgerun.engine.messages import LlmInfo
from edgerun.errors import ModelLoadFailed
from edgerun.llm.llama_api import NOT_GENERATING, ContextSettings, LlamaContext, LlamaLibrary, LlamaModel
from edgerun.llm.llama_runner import LlamaRunner
from edgerun.repository.spec import LlmSettings, ModelSpec

logger = logging.getLogger(__name__)

# A pool of more than this many full contexts is memory that an edge box rarely gets to use.
_FULL_CONTEXTS = 2
# The KV pool may take this share of what is free when the model loads; the rest is for compute buffers,
# the vision models and the system.
_KV_SHARE_OF_FREE = 0.25
_MIN_CONTEXT = 256  # below this a chat is not possible


@dataclass(frozen=True, slots=True)
class LoadedLlm:
    """Everything that a load produced. memory_bytes: weights and KV pool, an estimate."""

    model: LlamaModel
    runner: LlamaRunner
    settings: LlmSettings  # with every 0 resolved
    info: LlmInfo
    memory_bytes: int


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def resolve_settings(
    asked: LlmSettings, *, trained_context: int, kv_bytes_per_token: int, free_bytes: int, num_threads: int
) -> LlmSettings:
    """Fill in every 0. Pure, so that the sums can be tested.

    The pool holds up to two full contexts or what a quarter of the free memory takes, in whole blocks; a
    context longer than the pool is cut to it.
    """
    block = asked.block_size
    max_len = asked.max_model_len or trained_context
    if asked.num_kv_tokens:
        pool_tokens = asked.num_kv_tokens
    else:
        affordable = int(free_bytes * _KV_SHARE_OF_FREE) // max(1, kv_bytes_per_token)
        pool_tokens = min(max_len * min(_FULL_CONTEXTS, asked.max_num_seqs), affordable)
    pool_tokens = pool_tokens // block * block
    if pool_tokens < _MIN_CONTEXT:
        needed = _MIN_CONTEXT * kv_bytes_per_token
        raise ModelLoadFailed(
            f"the KV cache would hold {pool_tokens} tokens, at least {_MIN_CONTEXT} are needed "
            f"({needed / 2**20:.0f} MiB); {free_bytes / 2**20:.0f} MiB are free: close something or set "
            "num_kv_tokens in the model's config.toml"
        )
    return replace(
        asked,
        max_model_len=min(max_len, pool_tokens),
        num_kv_tokens=pool_tokens,
        num_threads=asked.num_threads or num_threads,
        max_num_batched_tokens=max(asked.max_num_batched_tokens, asked.max_num_seqs + block),
    )


def load_llm(
    library: LlamaLibrary,
    spec: ModelSpec,
    *,
    use_gpu: bool,
    num_threads: int,
    on_progress: Callable[[float], None] | None = None,
) -> LoadedLlm:
    """Load weights and make the KV pool; computes nothing yet (see loop.py).

    Raises ModelLoadFailed; nothing stays loaded then.
    """
    model = LlamaModel(library, spec.path, use_gpu=use_gpu, on_progress=on_progress)
    try:
        if not model.is_generating():
            raise ModelLoadFailed(f"{spec.path} {NOT_GENERATING}", path=spec.path)
        settings = resolve_settings(
            spec.llm,
            trained_context=model.trained_context(),
            kv_bytes_per_token=model.kv_bytes_per_token(spec.llm.kv_cache_dtype),
            free_bytes=psutil.virtual_memory().available,
            num_threads=num_threads,
        )
        context = LlamaContext(
            model,
            ContextSettings(
                num_kv_tokens=settings.num_kv_tokens,
                max_batch_tokens=settings.max_num_batched_tokens,
                max_num_seqs=settings.max_num_seqs,
                num_threads=settings.num_threads,
                kv_cache_dtype=settings.kv_cache_dtype,
            ),
        )
    except ModelLoadFailed:
        model.close()
        raise
    end_tokens = model.end_tokens()
    runner = LlamaRunner(model, context, end_tokens)
    memory = model.size_bytes() + settings.num_kv_tokens * model.kv_bytes_per_token(settings.kv_cache_dtype)
    logger.info(
        "loaded %s: %d tokens of context, %d tokens of KV pool, %d threads",
        spec.name,
        settings.max_model_len,
        settings.num_kv_tokens,
        settings.num_threads,
    )
    info = _describe(model, settings, end_tokens)
    return LoadedLlm(model=model, runner=runner, settings=settings, info=info, memory_bytes=memory)


def _describe(model: LlamaModel, settings: LlmSettings, end_tokens: list[int]) -> LlmInfo:
    return LlmInfo(
        architecture=model.metadata("general.architecture"),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        num_kv_tokens=settings.num_kv_tokens,
        chat_template=model.chat_template(),
        bos_text=model.token_text(model.bos()),
        eos_text=model.token_text(model.eos()),
        add_bos=model.adds_bos(),
        eog_token_ids=end_tokens,
        special_texts=model.control_texts(),
        pieces=model.pieces(),
    )
