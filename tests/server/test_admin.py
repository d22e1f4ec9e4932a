"""/health, /ready and /v1/device."""

from __future__ import annotations

import msgspec
import pytest

from .fakes import LLM_INFO, LLM_SPEC, FakeEngine, loaded_of
from .harness import running


@pytest.mark.parametrize("state", ["starting", "ready", "restarting", "stopped"])
def test_health_answers_whatever_the_engine_does(state: str) -> None:
    with running(FakeEngine(state=state)) as server:
        answer = server.client.get("/health")
    assert answer.status_code == 200
    assert answer.json()["server"] == "edgerun"
    assert answer.json()["engine"] == state


def test_a_probe_that_wants_no_body_is_answered() -> None:
    with running() as server:
        answers = [server.client.head(path) for path in ("/health", "/ready")]
    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b""), (200, b"")]


@pytest.mark.parametrize(
    ("reason", "state", "stuck", "shown"),
    [
        ("", "ready", "", None),
        ("loading parrot", "ready", "", "loading parrot"),
        ("", "restarting", "", "the engine is restarting"),
        ("", "ready", "no answer for 4 s", "no answer for 4 s"),
    ],
)
def test_ready_says_why_not(reason: str, state: str, stuck: str, shown: str | None) -> None:
    with running(FakeEngine(state=state, stuck=stuck), readiness=reason) as server:
        answer, device = (server.client.get(path) for path in ("/ready", "/v1/device"))
        health = server.client.get("/health")
    assert (answer.status_code, answer.json()["reason"]) == (503 if shown else 200, shown)
    assert health.status_code == 200
    if not reason:  # the server's own reasons are not the engine's
        assert device.json()["engine"]["reason"] == shown


def test_device_tells_report_load_and_what_runs() -> None:
    with running() as server:
        assert server.client.get("/v1/device").json()["models"] == []
        server.chat()
        body = server.client.get("/v1/device").json()
    assert body["cpu"]["cores_usable"] == 2
    assert {choice["provider"] for choice in body["providers"]} == {"cuda", "cpu", "CPUExecutionProvider"}
    assert body["engine"] == {"pid": 4711, "state": "ready", "reason": None}
    assert body["scheduler"] == {
        "max_num_seqs": 4,
        "num_running": 0,
        "num_waiting": 0,
        "kv_cache_usage": 0.25,
    }
    assert body["models"] == [
        {
            "name": "parrot",
            "kind": "llm",
            "version": 1,
            "provider": "cpu",
            "reason": "it ran",
            "size_bytes": 1000,
            "max_num_seqs": 4,
            "llm": {
                "max_model_len": 4096,
                "max_num_seqs": 4,
                "num_kv_tokens": 16384,
                "kv_layout": "unified",
                "flash_attention": True,
                "num_threads": 2,
                "prefix_cache": True,
                "prefix_cache_reason": None,
                "num_running": 0,
                "num_waiting": 0,
                "kv_cache_usage": 0.25,
            },
        }
    ]
    assert body["models_size_bytes"] == 1000
    assert set(body["load"]) >= {"cpu_percent", "gpu_percent", "temperature_c", "power_w"}


def test_device_tells_why_there_is_no_prefix_cache() -> None:
    engine = FakeEngine()
    info = msgspec.structs.replace(LLM_INFO, prefix_cache=False, prefix_cache_reason="--no-prefix-cache")
    engine.loaded["plain"] = msgspec.structs.replace(loaded_of(LLM_SPEC), llm=info)
    with running(engine) as server:
        (model,) = server.client.get("/v1/device").json()["models"]
    assert model["llm"]["prefix_cache"] is False
    assert model["llm"]["prefix_cache_reason"] == "--no-prefix-cache"


@pytest.mark.parametrize("engine", [FakeEngine(state="restarting"), FakeEngine(stats_s=60)])
def test_device_answers_while_the_engine_does_not_say_how_it_is(engine: FakeEngine) -> None:
    with running(engine) as server:
        body = server.client.get("/v1/device").json()
    assert body["scheduler"]["num_running"] is None
    assert body["engine"]["pid"] == 4711
