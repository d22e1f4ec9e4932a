"""Choosing from made-up timings, with a fake clock; and that a real model is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgerun.llm.llama_api import LlamaLibrary, LlamaModel
from edgerun.llm.resolving import Facts
from edgerun.llm.tuning import BUDGET_S, Candidate, ModelProbe, TooSlow, Trial, choose, layouts, tune
from edgerun.repository.spec import LlmSettings

from .other_models import write_recurrent, write_sliding_window

FACTS = Facts(8192, 1000, "plain", 4 << 30, 4 << 30, 4)
GPU = Facts(8192, 1000, "plain", 4 << 30, 4 << 30, 4, use_gpu=True)
POOL, STREAMS_FLASH, STREAMS = (
    Candidate("unified", True, 4),
    Candidate("streams", True, 4),
    Candidate("streams", False, 4),
)


class Device:
    """A made-up machine. speed: relative time of a candidate's step; cost_s: what a round takes."""

    def __init__(self, speed: dict[Candidate, float], cost_s: float = 0.1, open_s: float = 0.2) -> None:
        self.speed, self.cost_s, self.open_s, self.now_s = speed, cost_s, open_s, 0.0
        self.opened: list[Candidate] = []
        self.num_closed = self.num_rounds = 0

    def clock(self) -> float:
        return self.now_s

    def open(self, candidate: Candidate) -> FakeProbe:
        self.now_s += self.open_s
        self.opened.append(candidate)
        return FakeProbe(self, candidate)


class FakeProbe:
    def __init__(self, device: Device, candidate: Candidate) -> None:
        self.device, self.candidate = device, candidate

    def run_round(self, num_threads: int) -> None:
        self.device.now_s += self.device.cost_s
        self.device.num_rounds += 1

    def trial(self, num_threads: int, *, by_wall: bool) -> Trial:
        candidate = Candidate(self.candidate.layout, self.candidate.flash_attention, num_threads)
        speed = self.device.speed.get(candidate, 2.0)
        return Trial(candidate, 8, 0.01 * speed, 0.05 * speed, 0.001 * speed)

    def close(self) -> None:
        self.device.num_closed += 1


def tuned(
    device: Device, asked: LlmSettings | None = None, facts: Facts = FACTS, load: float = 0.0
) -> Candidate:
    tuning = tune(asked or LlmSettings(), facts, device.open, device.clock, lambda: load)
    assert tuning is not None
    return Candidate(tuning.kv_layout, tuning.flash_attention, tuning.num_threads)


# ---- what is tried


def test_a_pool_without_flash_attention_is_not_tried() -> None:
    assert layouts(LlmSettings(), FACTS) == [POOL, STREAMS, STREAMS_FLASH]


def test_a_gpu_is_tried_with_flash_attention_only() -> None:
    assert layouts(LlmSettings(), GPU) == [POOL, STREAMS_FLASH]


def test_a_quantised_cache_needs_flash_attention() -> None:
    assert layouts(LlmSettings(kv_cache_dtype="q8_0"), FACTS) == [POOL, STREAMS_FLASH]


def test_what_the_config_fixes_is_not_tried_otherwise() -> None:
    assert layouts(LlmSettings(flash_attention="on"), FACTS) == [POOL, STREAMS_FLASH]
    assert layouts(LlmSettings(kv_layout="streams"), FACTS) == [STREAMS, STREAMS_FLASH]
    assert layouts(LlmSettings(flash_attention="off"), FACTS) == [STREAMS]
    everything = LlmSettings(kv_layout="unified", flash_attention="off", num_threads=2)
    assert tune(everything, FACTS, Device({}).open) is None


def test_streams_that_do_not_fit_the_memory_are_not_tried() -> None:
    small = Facts(8192, 1000, "plain", 100 << 20, 100 << 20, 4)
    assert layouts(LlmSettings(), small) == [POOL]


@pytest.mark.parametrize("kind", ["window", "recurrent"])
def test_streams_are_not_tried_where_they_share_nothing(kind: str) -> None:
    other = Facts(8192, 1000, kind, 4 << 30, 4 << 30, 4)  # type: ignore[arg-type]
    assert layouts(LlmSettings(), other) == [POOL]


# ---- what is chosen


def test_the_fastest_is_chosen_and_stands_first() -> None:
    device = Device({POOL: 1.0, STREAMS_FLASH: 0.9, STREAMS: 0.4})
    tuning = tune(LlmSettings(), FACTS, device.open, device.clock, lambda: 0.0)
    assert tuning is not None
    assert (tuning.kv_layout, tuning.flash_attention, tuning.num_threads) == ("streams", False, 4)
    assert tuning.trials[0].startswith(
        "streams, flash attention off, 4 threads: 1 stream 4.0 ms a step, 8 streams"
    )
    assert len(tuning.trials) == 4  # three layouts, and half the threads for the best
    assert device.num_closed == 3


def test_a_small_gain_does_not_leave_the_default() -> None:
    assert tuned(Device({POOL: 1.0, STREAMS_FLASH: 0.96, STREAMS: 0.97})) == POOL


def test_fewer_threads_must_be_clearly_faster() -> None:
    half = Candidate("unified", True, 2)
    assert tuned(Device({POOL: 1.0, half: 0.9})) == POOL
    assert tuned(Device({POOL: 1.0, half: 0.8})) == half


def test_threads_are_not_judged_while_other_programs_compute() -> None:
    device = Device({POOL: 1.0, Candidate("unified", True, 2): 0.5})
    tuning = tune(LlmSettings(), FACTS, device.open, device.clock, lambda: 0.9)
    assert tuning is not None
    assert tuning.num_threads == 4
    assert "other programs kept 0.9 cores busy" in tuning.trials[-1]


def test_no_one_of_the_three_times_decides_alone() -> None:
    default = Trial(POOL, 8, 0.01, 0.05, 0.001)
    lone_only = Trial(STREAMS, 8, 0.005, 0.2, 0.001)  # twice as fast alone, four times slower in a crowd
    assert choose([default, lone_only]) == default
    assert lone_only.relative_to(default) == pytest.approx(2 ** (1 / 3))


# ---- the budget


def test_the_measuring_stays_within_its_budget() -> None:
    for cost_s in (0.01, 0.1, 0.5, 1.0):
        device = Device({STREAMS: 0.5}, cost_s=cost_s, open_s=cost_s)
        tuned(device)
        assert device.now_s <= BUDGET_S + 2 * cost_s  # a round that began is ended


def test_a_slow_model_is_measured_less() -> None:
    device = Device({POOL: 1.0, STREAMS_FLASH: 0.5, STREAMS: 0.1}, open_s=2.5)
    tuning = tune(LlmSettings(), FACTS, device.open, device.clock, lambda: 0.0)
    assert device.opened == [POOL]
    assert tuning is not None
    assert tuning.kv_layout == "unified"
    assert any("not tried, for want of time" in line for line in tuning.trials)


def test_a_model_that_is_too_slow_keeps_the_default_and_says_so() -> None:
    def refuse(candidate: Candidate) -> FakeProbe:
        raise TooSlow("a token of a prompt takes 900 ms")

    tuning = tune(LlmSettings(), FACTS, refuse)
    assert tuning is not None
    assert (tuning.kv_layout, tuning.flash_attention, tuning.num_threads) == ("unified", True, 4)
    assert tuning.trials == (f"{POOL}: not measured, a token of a prompt takes 900 ms",)


# ---- for real


@pytest.mark.native
@pytest.mark.parametrize("write", [None, write_sliding_window, write_recurrent])
def test_a_real_model_is_measured(
    llama_lib_dir: Path, tiny_gguf: Path, tmp_path: Path, write: Callable[[Path], None] | None
) -> None:
    path = tiny_gguf
    if write is not None:
        path = tmp_path / "other.gguf"
        write(path)
    model = LlamaModel(LlamaLibrary(llama_lib_dir), str(path), use_gpu=False)
    facts = Facts(512, model.kv_bytes_per_token("f16"), model.memory_kind(), 1 << 30, 1 << 30, 2)
    asked, began_s = LlmSettings(), time.monotonic()
    tuning = tune(asked, facts, lambda candidate: ModelProbe(model, asked, facts, candidate))
    assert time.monotonic() - began_s < 10
    assert tuning is not None
    measured = [line for line in tuning.trials if "tokens/s" in line]
    assert len(measured) >= (3 if write is None else 1)
    assert (tuning.kv_layout, tuning.flash_attention) != ("unified", False)
    model.close()
