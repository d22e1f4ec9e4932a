"""/metrics: names that dashboards know, counters that never fall, gauges that come back."""

from __future__ import annotations

import asyncio
import io
import itertools
import time

import httpx
import msgspec
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from edgerun.engine.messages import LlmStats, Stats
from edgerun.errors import EngineLost
from edgerun.server.metrics import EngineCollector, GenerationTimer, ServerMetrics

from .fakes import FakeEngine, stats_of
from .harness import Running, chat_body, running


def samples(text: str) -> dict[str, float]:
    """`name{label values}` without the times of creation."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def scrape(server: Running) -> dict[str, float]:
    response = server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return samples(response.text)


def test_a_chat_is_counted() -> None:
    with running() as server:
        usage = server.chat(max_tokens=5).json()["usage"]
        server.chat()
        found = scrape(server)
    label = "{model_name=parrot}"
    assert found[f"vllm:prompt_tokens_total{label}"] == 2 * usage["prompt_tokens"]
    assert found[f"vllm:generation_tokens_total{label}"] == 5 + len(FakeEngine.answer)
    assert found["vllm:request_success_total{finished_reason=length,model_name=parrot}"] == 1
    assert found["vllm:request_success_total{finished_reason=stop,model_name=parrot}"] == 1
    assert found[f"vllm:time_to_first_token_seconds_count{label}"] == 2
    assert found[f"vllm:inter_token_latency_seconds_count{label}"] == 4 + len(FakeEngine.answer) - 1
    assert found[f"vllm:e2e_request_latency_seconds_count{label}"] == 2
    assert found[f"vllm:kv_cache_usage_perc{label}"] == 0.25


def test_pictures_are_counted_by_how_they_end() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    with running() as server:
        files = [("file", ("x", data, "image/png")) for data in (buffer.getvalue(), b"bad")]
        server.client.post("/v1/images/classify", files=files)
        found = scrape(server)
    assert found["nv_inference_request_success_total{model=rgb,version=3}"] == 1
    assert found["nv_inference_request_failure_total{model=rgb,reason=REJECTED,version=3}"] == 1


def test_the_running_gauge_comes_back_when_a_client_leaves() -> None:
    engine = FakeEngine(is_endless=True, step_s=0.001)
    running_now = "vllm:num_requests_running{model_name=parrot}"
    with running(engine) as server:
        with server.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            chunks = response.iter_raw()  # closes the response when it is dropped
            next(chunks)
            assert samples_over_tcp(server)[running_now] == 1
        deadline = time.monotonic() + 10
        while scrape(server)[running_now]:
            assert time.monotonic() < deadline
        found = scrape(server)
    assert found["vllm:request_success_total{finished_reason=abort,model_name=parrot}"] == 1


def samples_over_tcp(server: Running) -> dict[str, float]:
    return samples(httpx.get(f"{server.url}/metrics").text)


def test_a_stuck_engine_does_not_hang_the_scrape() -> None:
    with running(FakeEngine(stats_s=60)) as server:
        assert scrape(server)["edgerun_engine_up{}"] == 0


def test_an_engine_that_counts_but_whose_step_does_not_end_is_not_up() -> None:
    with running(FakeEngine(stuck="one step has taken 60 s")) as server:
        assert scrape(server)["edgerun_engine_up{}"] == 0


@pytest.mark.parametrize("lives", [[3, 8], [3, 8, 2, 5], [10, 0, 10]])
def test_counters_add_up_over_the_lives_of_the_engine(lives: list[int]) -> None:
    collector = EngineCollector()
    last = 0.0
    for hits in lives:
        collector.update(stats_of(hits=hits))
        value = value_of(collector, "vllm:prefix_cache_hits")
        assert value >= last
        last = value
    deaths = sum(before for before, now in itertools.pairwise(lives) if now < before)
    assert last == deaths + lives[-1]


def test_a_lost_engine_keeps_its_counters_and_empties_its_gauges() -> None:
    collector = EngineCollector()
    collector.update(stats_of(num_running=4, hits=7))
    collector.lost()
    assert value_of(collector, "vllm:prefix_cache_hits") == 7
    assert value_of(collector, "vllm:num_requests_running") == 0


BUSY = msgspec.structs.replace(
    stats_of().llm["parrot"],
    num_parked=5,
    num_swapped=2,
    swap_bytes=4096,
    swaps_total=3,
    recomputes_total=4,
    kv_waste=0.125,
    step_ms=12.5,
    prefill_tokens_per_s=640.0,
    prefix_misses={"new": 6, "evicted": 1},
)


def test_the_kv_cache_and_the_steps_are_shown() -> None:
    with running(FakeEngine(stats_now=llm_stats(BUSY))) as server:
        found = scrape(server)
    label = "{model_name=parrot}"
    assert found[f"edgerun_kv_parked_sequences{label}"] == 5
    assert found[f"edgerun_kv_swapped_sequences{label}"] == 2
    assert found[f"edgerun_kv_swap_bytes{label}"] == 4096
    assert found[f"edgerun_kv_swaps_total{label}"] == 3
    assert found[f"edgerun_kv_recomputes_total{label}"] == 4
    assert found[f"edgerun_kv_waste_ratio{label}"] == 0.125
    assert found[f"edgerun_step_decode_seconds{label}"] == 0.0125
    assert found[f"edgerun_prefill_tokens_per_second{label}"] == 640
    assert found["edgerun_prefix_cache_misses_total{model_name=parrot,reason=new}"] == 6
    assert found["edgerun_prefix_cache_misses_total{model_name=parrot,reason=evicted}"] == 1


def test_misses_add_up_over_engines_that_do_not_name_every_reason() -> None:
    collector = EngineCollector()
    for misses in ({"new": 6, "evicted": 1}, {"new": 2}, {"new": 3, "evicted": 4}):
        collector.update(llm_stats(msgspec.structs.replace(BUSY, prefix_misses=misses)))
    found = {
        sample.labels["reason"]: sample.value
        for family in collector.collect()
        if family.name == "edgerun_prefix_cache_misses"
        for sample in family.samples
    }
    assert found == {"new": 6 + 3, "evicted": 1 + 4}


def test_all_gauges_of_a_lost_engine_are_zero() -> None:
    collector = EngineCollector()
    collector.update(llm_stats(BUSY))
    collector.lost()
    gauges = [family for family in collector.collect() if family.type == "gauge"]
    assert len(gauges) > 8
    assert not any(sample.value for family in gauges for sample in family.samples)


def llm_stats(llm: LlmStats) -> Stats:
    return Stats(request_id=1, llm={"parrot": llm}, vision={})


def value_of(collector: EngineCollector, name: str) -> float:
    (family,) = [family for family in collector.collect() if family.name == name]
    return float(family.samples[0].value)


def test_an_engine_error_is_no_error_of_the_page() -> None:
    class Broken(FakeEngine):
        async def stats(self):  # type: ignore[no-untyped-def]
            raise EngineLost("gone")

    page = asyncio.run(ServerMetrics().render(Broken()))  # type: ignore[arg-type]
    assert samples(page.decode())["edgerun_engine_up{}"] == 0


def test_tokens_of_one_step_share_its_time() -> None:
    metrics = ServerMetrics()
    timer = GenerationTimer(metrics, "m")
    timer.tokens(1)
    timer.tokens(4)
    found = samples(asyncio.run(metrics.render(FakeEngine())).decode())  # type: ignore[arg-type]
    assert found["vllm:inter_token_latency_seconds_count{model_name=m}"] == 4
    assert found["vllm:time_to_first_token_seconds_count{model_name=m}"] == 1
