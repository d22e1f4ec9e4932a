"""/health, /ready and /v1/device."""

from __future__ import annotations

import pytest

from .fakes import FakeEngine
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
    assert body["scheduler"] == {"max_num_seqs": 4}
    assert body["models"] == [
        {
            "name": "parrot",
            "kind": "llm",
            "version": 1,
            "provider": "cpu",
            "reason": "it ran",
            "size_bytes": 1000,
            "max_num_seqs": 4,
        }
    ]
    assert body["models_size_bytes"] == 1000
    assert set(body["load"]) >= {"cpu_percent", "gpu_percent", "temperature_c", "power_w"}
