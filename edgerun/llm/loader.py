"""From a model spec to a ready runner, and what the server must know of the model. Runs once per load.

What is left open in `config.toml` is decided in resolving, from the facts that are gathered here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from edgerun.device.cgroup import read_limits
from edgerun.device.files import SystemFiles
from edgerun.device.memory import read_memory
from edgerun.engine.messages import LlmInfo, LlmTuning
from edgerun.errors import ModelLoadFailed
from edgerun.llm.kv_memory import KvRegion, large_mappings
from edgerun.llm.llama_api import NOT_GENERATING, ContextSettings, LlamaContext, LlamaLibrary, LlamaModel
from edgerun.llm.llama_runner import CallRule, LlamaRunner
from edgerun.llm.resolving import Facts, Resolved, resolve_settings
from edgerun.llm.thread_governor import ThreadGovernor
from edgerun.repository.spec import LlmSettings, ModelSpec

logger = logging.getLogger(__name__)

# A pass over the weights against attention to as many bytes of KV cache, on a CPU: SmolLM2-135M, 2 threads, a
# pass 5 ms, a cell 3.4 us.
_PASS_SHARE = 0.4
# Left to the system: less than this free, and it drops the pages of running programs or kills one.
_MAX_RESERVE_BYTES, _RESERVE_SHARE = 1 << 30, 0.1


@dataclass(frozen=True, slots=True)
class LoadedLlm:
    """Everything that a load produced. memory_bytes: weights and KV cache, an estimate.

    kv_region: where the KV cache lies in main memory; None on a GPU, or when it was not found.
    """

    model: LlamaModel
    context: LlamaContext
    runner: LlamaRunner
    facts: Facts
    resolved: Resolved
    is_deterministic: bool
    info: LlmInfo
    memory_bytes: int
    kv_region: KvRegion | None

    @property
    def settings(self) -> LlmSettings:
        """With every 0 and "auto" decided."""
        return self.resolved.settings


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def usable_bytes(available_bytes: int, total_bytes: int) -> int:
    """What may be planned with: what is available without the system's reserve."""
    return max(0, available_bytes - min(int(total_bytes * _RESERVE_SHARE), _MAX_RESERVE_BYTES))


def load_llm(
    library: LlamaLibrary,
    spec: ModelSpec,
    *,
    use_gpu: bool,
    num_threads: int,
    on_progress: Callable[[float], None] | None = None,
    deterministic: bool = False,
    prefix_cache: bool = True,
    tuning: LlmTuning | None = None,
) -> LoadedLlm:
    """Load weights and make the KV cache; computes nothing yet (see loop.py).

    num_threads: what the device would use. deterministic, prefix_cache: what the server was started with.
    tuning: what was measured before, if it was. Raises ModelLoadFailed; nothing stays loaded then.
    """
    model = LlamaModel(library, spec.path, use_gpu=use_gpu, on_progress=on_progress)
    try:
        if not model.is_generating():
            raise ModelLoadFailed(f"{spec.path} {NOT_GENERATING}", path=spec.path)
        facts = gather_facts(library, model, spec.llm, use_gpu=use_gpu, num_threads=num_threads)
        resolved = resolve_settings(
            spec.llm,
            facts,
            tuning=tuning,
            deterministic=deterministic,
            prefix_cache=prefix_cache,
        )
        context, region = _open_context(model, facts, resolved)
    except ModelLoadFailed:
        model.close()
        raise
    end_tokens = model.end_tokens()
    cells_per_pass = int(_PASS_SHARE * model.size_bytes() / max(1, facts.kv_bytes_per_token))
    rule = CallRule(
        separate=not use_gpu,
        joins_equal=not resolved.is_unified,
        cells_per_pass=0 if resolved.is_unified else cells_per_pass,
    )
    settings = resolved.settings
    # With flash attention another number of threads gives other bits: the same request, another answer.
    is_free = not (use_gpu or deterministic or spec.llm.num_threads or resolved.has_flash_attention)
    governor = ThreadGovernor(settings.num_threads) if is_free else None
    logger.info(
        "loaded %s: %d tokens of context, %d sequences, %d tokens of KV cache (%s, flash attention %s), "
        "%d threads%s",
        spec.name,
        settings.max_model_len,
        settings.max_num_seqs,
        settings.num_kv_tokens,
        settings.kv_layout,
        settings.flash_attention,
        settings.num_threads,
        f"; no prefix cache: {resolved.prefix_cache_reason}" if resolved.prefix_cache_reason else "",
    )
    return LoadedLlm(
        model=model,
        context=context,
        runner=LlamaRunner(model, context, end_tokens, rule, resolved.spare_id, governor),
        facts=facts,
        resolved=resolved,
        is_deterministic=deterministic,
        info=_describe(model, resolved, end_tokens),
        memory_bytes=model.size_bytes() + settings.num_kv_tokens * facts.kv_bytes_per_token,
        kv_region=region,
    )


def gather_facts(
    library: LlamaLibrary, model: LlamaModel, asked: LlmSettings, *, use_gpu: bool, num_threads: int
) -> Facts:
    files = SystemFiles()
    memory = read_memory(files, read_limits(files), is_unified=False)
    host = usable_bytes(memory.available_bytes, memory.limit_bytes or memory.total_bytes)
    gpu = library.gpu_free_bytes() if use_gpu else None
    return Facts(
        trained_context=model.trained_context(),
        kv_bytes_per_token=model.kv_bytes_per_token(asked.kv_cache_dtype),
        memory_kind=model.memory_kind(),
        free_bytes=host if gpu is None else usable_bytes(gpu, gpu),
        host_free_bytes=host,
        num_threads=num_threads,
        use_gpu=use_gpu,
    )


def _open_context(
    model: LlamaModel, facts: Facts, resolved: Resolved
) -> tuple[LlamaContext, KvRegion | None]:
    """The context, with the pages of its cache handed back that nothing was written to yet."""
    settings = resolved.settings
    before = large_mappings()
    context = LlamaContext(
        model,
        ContextSettings(
            num_kv_tokens=settings.num_kv_tokens,
            max_batch_tokens=settings.max_num_batched_tokens,
            num_seq_ids=resolved.num_context_ids,
            num_threads=settings.num_threads,
            kv_cache_dtype=settings.kv_cache_dtype,
            unified=resolved.is_unified,
            flash_attention=resolved.has_flash_attention,
        ),
    )
    if facts.use_gpu or facts.memory_kind != "plain":
        return context, None
    region = KvRegion.find(before, settings.num_kv_tokens * facts.kv_bytes_per_token)
    if region is not None:
        region.hand_back()
    return context, region


def _describe(model: LlamaModel, resolved: Resolved, end_tokens: list[int]) -> LlmInfo:
    settings = resolved.settings
    return LlmInfo(
        architecture=model.metadata("general.architecture"),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        num_kv_tokens=settings.num_kv_tokens,
        kv_layout="unified" if resolved.is_unified else "streams",
        flash_attention=resolved.has_flash_attention,
        num_threads=settings.num_threads,
        prefix_cache=settings.prefix_cache,
        prefix_cache_reason=resolved.prefix_cache_reason,
        chat_template=model.chat_template(),
        bos_text=model.token_text(model.bos()),
        eos_text=model.token_text(model.eos()),
        add_bos=model.adds_bos(),
        eog_token_ids=end_tokens,
        special_texts=model.control_texts(),
        pieces=model.pieces(),
    )
