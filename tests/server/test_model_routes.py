"""/v1/models and the long acts with progress."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from edgerun.errors import InvalidModelFile, PullFailed

from .fakes import FakeEngine, FakeRepository
from .harness import Running, events_of, running


def act(server: Running, name: str, what: str) -> list[dict[str, object]]:
    response = server.client.post(f"/v1/models/{name}/{what}")
    assert response.status_code == 200, response.text
    return [json.loads(event) for event in events_of(response)]


def test_list_names_every_model_in_openais_shape() -> None:
    with running(repository=FakeRepository(pulled={"rgb"})) as server:
        body = server.client.get("/v1/models").json()
        assert body["object"] == "list"
        parrot, rgb = body["data"]
        assert server.client.get("/v1/models/rgb").json() == rgb
    assert (parrot["id"], parrot["kind"], parrot["pulled"], parrot["loaded"]) == (
        "parrot",
        "llm",
        False,
        False,
    )
    assert (rgb["id"], rgb["kind"], rgb["pulled"], rgb["version"]) == ("rgb", "vision", True, 3)
    assert {"object", "created", "owned_by"} <= set(parrot)
    assert parrot["max_model_len"] is None
    assert "max_model_len" not in rgb


def test_max_model_len_is_there_once_loaded() -> None:
    with running() as server:
        server.chat()
        assert server.client.get("/v1/models/parrot").json()["max_model_len"] == 4096


@pytest.mark.parametrize("what", ["pull", "load", "unload", "rollback"])
def test_an_unknown_model_is_a_404_before_any_event(what: str) -> None:
    with running() as server:
        response = server.client.post(f"/v1/models/nope/{what}")
        assert server.client.get("/v1/models/nope").status_code == 404
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_load_and_unload() -> None:
    with running() as server:
        events = act(server, "parrot", "load")
        assert events[0] == {"stage": "load", "done": 1, "total": 2}
        assert events[-1]["stage"] == "done"
        assert "parrot" in server.engine.loaded
        assert act(server, "parrot", "unload")[-1]["stage"] == "done"
        assert not server.engine.loaded
        assert act(server, "parrot", "unload")[-1]["stage"] == "done"


def test_pull_makes_a_model_usable() -> None:
    with running(repository=FakeRepository(pulled={"rgb"})) as server:
        refused = server.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_pulled")
        events = act(server, "parrot", "pull")
        assert events[-2] == {"stage": "download", "done": 2, "total": 2}
        assert server.chat().status_code == 200


def test_a_failure_is_the_last_event() -> None:
    failing = FakeEngine(error_on_load=InvalidModelFile("the file is cut off"))
    repository = FakeRepository(pull_error=PullFailed("no network"))
    with running(failing, repository) as server:
        assert act(server, "parrot", "load")[-1]["error"]["code"] == "invalid_model_file"  # type: ignore[index]
        assert act(server, "parrot", "pull")[-1]["error"]["code"] == "pull_failed"  # type: ignore[index]
        assert act(server, "parrot", "rollback")[-1]["error"]["code"] == "model_not_pulled"  # type: ignore[index]


def test_a_pull_goes_on_when_its_client_leaves() -> None:
    repository = FakeRepository(pulled={"rgb"}, pull_gate=threading.Event())
    with running(repository=repository) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket))) as leaving:
            request = leaving.build_request("POST", "http://localhost/v1/models/parrot/pull")
            response = leaving.send(request, stream=True)
            next(response.iter_raw())
            response.close()
        assert repository.pull_gate is not None
        repository.pull_gate.set()
        assert act(server, "parrot", "pull")[-1]["stage"] == "done"
        assert "parrot" in repository.pulled
