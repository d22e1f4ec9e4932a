from __future__ import annotations

import pytest

from edgerun.errors import ModelLoadFailed
from edgerun.llm.loader import resolve_settings
from edgerun.repository.spec import LlmSettings

MIB = 2**20


def resolve(
    asked: LlmSettings, *, trained: int = 8192, per_token: int = 1000, free: int = 4000 * MIB
) -> LlmSettings:
    return resolve_settings(
        asked, trained_context=trained, kv_bytes_per_token=per_token, free_bytes=free, num_threads=3
    )


def test_the_default_pool_is_two_full_contexts() -> None:
    settings = resolve(LlmSettings())
    assert (settings.max_model_len, settings.num_kv_tokens, settings.num_threads) == (8192, 16384, 3)


def test_a_single_sequence_needs_one_context_only() -> None:
    assert resolve(LlmSettings(max_num_seqs=1)).num_kv_tokens == 8192


def test_a_small_memory_cuts_pool_and_context_to_a_quarter_of_what_is_free() -> None:
    settings = resolve(LlmSettings(), trained=131072, per_token=100_000, free=800 * MIB)
    assert settings.num_kv_tokens == settings.max_model_len == 200 * MIB // 100_000 // 16 * 16


def test_what_the_config_says_holds() -> None:
    settings = resolve(LlmSettings(max_model_len=1000, num_kv_tokens=5000, num_threads=1))
    assert (settings.max_model_len, settings.num_kv_tokens, settings.num_threads) == (1000, 4992, 1)


def test_a_context_longer_than_the_pool_is_cut_to_it() -> None:
    assert resolve(LlmSettings(max_model_len=8000, num_kv_tokens=1600)).max_model_len == 1600


def test_a_step_has_room_for_every_sequence_and_a_block() -> None:
    assert resolve(LlmSettings(max_num_batched_tokens=8, max_num_seqs=8)).max_num_batched_tokens == 24


def test_too_little_memory_is_refused_with_the_sums() -> None:
    with pytest.raises(ModelLoadFailed, match=r"at least 256 are needed \(244 MiB\); 100 MiB are free"):
        resolve(LlmSettings(), per_token=1_000_000, free=100 * MIB)
