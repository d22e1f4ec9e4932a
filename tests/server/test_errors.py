"""Our error types as HTTP."""

from __future__ import annotations

import inspect
import json

import pytest

from edgerun import errors
from edgerun.server.errors import TABLE, describe_validation, error_body, mapped, response_of

from .harness import running


def test_every_request_error_has_a_status_of_its_own() -> None:
    found = [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.EdgerunError) and cls is not errors.ServerStartError
    ]
    assert [cls.__name__ for cls in found if cls not in TABLE] == []


def test_a_new_subclass_is_answered_as_its_base() -> None:
    class Newer(errors.ModelNotFound):
        pass

    assert mapped(Newer("x")).status == 404


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (errors.QueueFull("full", retry_after_s=0.2), 429, "1"),
        (errors.QueueFull("full"), 429, "1"),
        (errors.EngineLost("gone"), 503, "1"),
    ],
)
def test_what_may_work_soon_says_when(error: errors.EdgerunError, status: int, retry: str) -> None:
    response = response_of(error)
    assert (response.status_code, response.headers["retry-after"]) == (status, retry)


def test_clients_are_told_not_to_repeat_what_cannot_work() -> None:
    response = response_of(errors.InvalidModelFile("cut off", name="x"))
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"


def test_a_missed_deadline_is_a_504_that_clients_do_not_repeat() -> None:
    response = response_of(errors.DeadlineExceeded("late", deadline_s=0.5))
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    error = json.loads(bytes(response.body))["error"]
    assert (error["type"], error["code"]) == ("deadline_exceeded", "deadline_exceeded")


def test_details_fill_param_and_code() -> None:
    error = errors.InvalidRequest("bad", param="stop", code="too_many")
    body = json.loads(bytes(response_of(error).body))["error"]
    assert (body["param"], body["code"]) == ("stop", "too_many")


def test_long_messages_are_cut_and_stay_valid() -> None:
    body = json.loads(error_body("\ud83d" * 10_000, "t", None, None))
    assert len(body["error"]["message"]) < 2100


def test_paths_read_as_a_person_writes_them() -> None:
    finding = {
        "type": "missing",
        "loc": ("body", "messages", 0, "content", 1, "text"),
        "msg": "Field required",
    }
    assert describe_validation([finding], []) == (
        "messages[0].content[1].text is required",
        "messages[0].content[1].text",
    )


def test_an_unknown_route_is_a_404_in_the_same_shape() -> None:
    with running() as server:
        answer = server.client.get("/v1/no/such/route")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
