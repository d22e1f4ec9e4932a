"""The sums and rules that fill in what config.toml leaves open."""

from __future__ import annotations

import pytest

from edgerun.engine.messages import LlmTuning
from edgerun.errors import ModelLoadFailed
from edgerun.llm.llama_api import MemoryKind
from edgerun.llm.resolving import NO_SPARE, Facts, Resolved, may_be_streams, resolve_settings
from edgerun.repository.spec import FlashAttention, LlmSettings

MIB, GIB = 2**20, 2**30
STREAMS = LlmTuning(kv_layout="streams", flash_attention=False, num_threads=2)
UNIFIED = LlmTuning(kv_layout="unified", flash_attention=True, num_threads=2)


def facts(
    *,
    trained: int = 8192,
    per_token: int = 1000,
    free: int = 4000 * MIB,
    kind: MemoryKind = "plain",
    use_gpu: bool = False,
) -> Facts:
    return Facts(trained, per_token, kind, free, free, 3, use_gpu)


def layout(resolved: Resolved) -> tuple[str, str, int, int]:
    settings = resolved.settings
    return settings.kv_layout, settings.flash_attention, settings.max_num_seqs, settings.num_kv_tokens


# ---- sizes of a pool


def test_the_default_is_a_pool_of_two_full_contexts() -> None:
    resolved = resolve_settings(LlmSettings(), facts())
    assert layout(resolved) == ("unified", "on", 16, 16384)
    assert (resolved.settings.max_model_len, resolved.settings.num_threads) == (8192, 3)


def test_a_single_sequence_needs_one_context_only() -> None:
    assert resolve_settings(LlmSettings(max_num_seqs=1), facts()).settings.num_kv_tokens == 8192


def test_a_small_memory_cuts_pool_and_context_to_a_quarter_of_what_is_free() -> None:
    small = facts(trained=131072, per_token=100_000, free=800 * MIB)
    settings = resolve_settings(LlmSettings(), small).settings
    assert settings.num_kv_tokens == settings.max_model_len == 200 * MIB // 100_000 // 16 * 16


def test_what_the_config_says_holds() -> None:
    asked = LlmSettings(max_model_len=1000, num_kv_tokens=5000, num_threads=1, swap_space_bytes=7)
    settings = resolve_settings(asked, facts(), tuning=UNIFIED).settings
    assert (settings.max_model_len, settings.num_kv_tokens, settings.num_threads) == (1000, 4992, 1)
    assert settings.swap_space_bytes == 7


def test_a_context_longer_than_the_pool_is_cut_to_it() -> None:
    asked = LlmSettings(max_model_len=8000, num_kv_tokens=1600)
    assert resolve_settings(asked, facts()).settings.max_model_len == 1600


def test_a_step_has_room_for_every_sequence_and_for_prompts() -> None:
    asked = LlmSettings(max_num_batched_tokens=8, max_num_seqs=8)
    assert resolve_settings(asked, facts()).settings.max_num_batched_tokens == 8 + 128


def test_too_little_memory_is_refused_with_the_sums() -> None:
    with pytest.raises(ModelLoadFailed, match=r"at least 256 are needed \(244 MiB\); 100 MiB are free"):
        resolve_settings(LlmSettings(), facts(per_token=1_000_000, free=100 * MIB))


def test_swapping_takes_an_eighth_of_what_is_free_and_at_most_two_gigabytes() -> None:
    assert resolve_settings(LlmSettings(), facts(free=800 * MIB)).settings.swap_space_bytes == 100 * MIB
    assert resolve_settings(LlmSettings(), facts(free=80 * GIB)).settings.swap_space_bytes == 2 * GIB


def test_a_pool_has_ids_for_parked_sequences_and_one_spare() -> None:
    resolved = resolve_settings(LlmSettings(max_num_seqs=4), facts())
    assert (resolved.num_seq_ids, resolved.spare_id, resolved.num_context_ids) == (16, 16, 17)
    most = resolve_settings(LlmSettings(max_num_seqs=256), facts())
    assert most.settings.max_num_seqs == most.num_seq_ids == most.spare_id == 255
    assert most.num_context_ids == 256


# ---- layout


def test_what_was_measured_is_done() -> None:
    resolved = resolve_settings(LlmSettings(max_num_seqs=4), facts(), tuning=STREAMS)
    assert layout(resolved) == ("streams", "off", 4, 4 * 8192)
    assert resolved.settings.num_threads == 2
    assert (resolved.num_seq_ids, resolved.spare_id, resolved.num_context_ids) == (4, NO_SPARE, 4)


def test_the_config_wins_over_what_was_measured() -> None:
    asked = LlmSettings(kv_layout="unified", num_threads=7)
    resolved = resolve_settings(asked, facts(), tuning=STREAMS)
    assert layout(resolved)[:2] == ("unified", "on")
    assert resolved.settings.num_threads == 7
    asked = LlmSettings(kv_layout="streams", flash_attention="on", max_num_seqs=2)
    assert layout(resolve_settings(asked, facts(), tuning=UNIFIED))[:2] == ("streams", "on")


def test_streams_that_do_not_fit_become_a_pool() -> None:
    tight = facts(free=4 * 8192 * 1000 * 15)  # a quarter holds 15 streams
    assert layout(resolve_settings(LlmSettings(), tight, tuning=STREAMS))[:3] == ("unified", "on", 16)
    assert not may_be_streams(LlmSettings(), tight)
    assert may_be_streams(LlmSettings(max_num_seqs=15), tight)


def test_streams_that_were_asked_for_are_as_many_as_fit() -> None:
    tight = facts(free=4 * 8192 * 1000 * 5)
    asked = LlmSettings(kv_layout="streams")
    assert layout(resolve_settings(asked, tight)) == ("streams", "off", 5, 5 * 8192)
    one = resolve_settings(asked, facts(free=4 * 1000 * 1000))
    assert layout(one) == ("streams", "off", 1, 768)  # less than one context: in whole 256 cells
    assert one.settings.max_model_len == 768


def test_a_stream_is_rounded_up_to_whole_256_cells() -> None:
    asked = LlmSettings(max_model_len=700, max_num_seqs=3)
    resolved = resolve_settings(asked, facts(), tuning=STREAMS)
    assert layout(resolved) == ("streams", "off", 3, 3 * 768)
    assert resolved.settings.max_model_len == 700


@pytest.mark.parametrize(
    ("max_len", "expected"),
    [(1024, ("streams", "off", 8, 8192)), (8192, ("unified", "on", 16, 8192))],
)
def test_a_given_number_of_cells_is_divided_where_two_streams_fit(
    max_len: int, expected: tuple[str, str, int, int]
) -> None:
    asked = LlmSettings(num_kv_tokens=8192, max_model_len=max_len)
    assert layout(resolve_settings(asked, facts(), tuning=STREAMS)) == expected


@pytest.mark.parametrize("tuning", [None, STREAMS, UNIFIED])
@pytest.mark.parametrize("kind", ["plain", "window", "recurrent", "hybrid"])
@pytest.mark.parametrize("flash", ["auto", "on"])
@pytest.mark.parametrize("free", [100 * MIB, 4000 * MIB])
def test_a_pool_without_flash_attention_is_never_chosen_by_itself(
    tuning: LlmTuning | None, kind: MemoryKind, flash: FlashAttention, free: int
) -> None:
    asked = LlmSettings(flash_attention=flash)
    resolved = resolve_settings(asked, facts(kind=kind, free=free), tuning=tuning)
    assert layout(resolved)[:2] != ("unified", "off")


def test_without_flash_attention_sequences_get_streams_unless_a_pool_is_asked_for() -> None:
    asked = LlmSettings(flash_attention="off", max_num_seqs=4)
    assert layout(resolve_settings(asked, facts()))[:2] == ("streams", "off")
    asked = LlmSettings(flash_attention="off", kv_layout="unified")
    assert layout(resolve_settings(asked, facts()))[:2] == ("unified", "off")


def test_a_quantised_cache_has_flash_attention() -> None:
    asked = LlmSettings(kv_cache_dtype="q8_0", max_num_seqs=2)
    assert layout(resolve_settings(asked, facts(), tuning=STREAMS))[:2] == ("streams", "on")
    with pytest.raises(ModelLoadFailed, match="needs flash attention"):
        resolve_settings(LlmSettings(kv_cache_dtype="q4_0", flash_attention="off"), facts())


# ---- deterministic


def test_deterministic_on_a_cpu_is_streams_with_fixed_threads() -> None:
    resolved = resolve_settings(LlmSettings(), facts(), tuning=UNIFIED, deterministic=True)
    assert layout(resolved)[:3] == ("streams", "off", 16)
    assert resolved.settings.num_threads == 3
    assert resolved.settings.prefix_cache
    tight = facts(free=4 * 8192 * 1000)
    assert layout(resolve_settings(LlmSettings(), tight, deterministic=True))[:3] == ("streams", "off", 1)


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
def test_deterministic_runs_alone_what_was_not_shown_to_be_independent(kind: MemoryKind) -> None:
    resolved = resolve_settings(LlmSettings(), facts(kind=kind), deterministic=True)
    assert layout(resolved)[:3] == ("streams", "off", 1)


def test_deterministic_with_a_quantised_cache_runs_alone() -> None:
    resolved = resolve_settings(LlmSettings(kv_cache_dtype="q8_0"), facts(), deterministic=True)
    assert layout(resolved)[:3] == ("streams", "on", 1)


def test_deterministic_on_a_gpu_runs_alone_and_reuses_nothing() -> None:
    resolved = resolve_settings(LlmSettings(), facts(use_gpu=True), deterministic=True)
    assert layout(resolved)[:3] == ("unified", "on", 1)
    assert "GPU" in resolved.prefix_cache_reason
    assert not resolved.settings.prefix_cache


# ---- kinds of memory


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_what_cannot_be_cut_is_not_reused_and_says_why(kind: MemoryKind) -> None:
    resolved = resolve_settings(LlmSettings(), facts(kind=kind))
    assert f"the model is {kind}" in resolved.prefix_cache_reason
    assert not resolved.settings.prefix_cache
    assert (resolved.num_seq_ids, resolved.spare_id) == (16, NO_SPARE)


def test_a_sliding_window_is_kept_in_a_pool_and_never_swapped() -> None:
    asked = LlmSettings(swap_space_bytes=GIB)
    resolved = resolve_settings(asked, facts(kind="window"), tuning=STREAMS)
    assert layout(resolved)[:2] == ("unified", "on")
    assert resolved.settings.prefix_cache
    assert resolved.settings.swap_space_bytes == 0
    streams = resolve_settings(LlmSettings(kv_layout="streams"), facts(kind="window"))
    assert "sliding window" in streams.prefix_cache_reason


def test_who_switched_the_prefix_cache_off_is_named() -> None:
    assert resolve_settings(LlmSettings(), facts()).prefix_cache_reason == ""
    by_flag = resolve_settings(LlmSettings(), facts(), prefix_cache=False)
    assert by_flag.prefix_cache_reason == "--no-prefix-cache"
    by_config = resolve_settings(LlmSettings(prefix_cache=False), facts())
    assert "config.toml" in by_config.prefix_cache_reason
