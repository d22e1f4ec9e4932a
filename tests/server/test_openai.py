"""Which chat requests are taken and which are refused by name, as clients see it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from .harness import Running, chat_body, error_of, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "hi"}] * 10_001}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": 7, "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "banana", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["hi", 3]}]}, "messages[0].content[0]"),
        ({"stream": "maybe"}, "stream"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -7}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": 99}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 5}, "presence_penalty"),
        ({"frequency_penalty": -9}, "frequency_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -5}, "top_k"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"user": 7}, "user"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"deadline_ms": 1.5}, "deadline_ms"),
        ({"deadline_ms": "1000"}, "deadline_ms"),
        ({"deadline_ms": 2**31}, "deadline_ms"),
    ],
)
def test_a_bad_field_is_refused_by_name(server: Running, fields: dict[str, object], param: str) -> None:
    error = error_of(server.chat(**fields))
    assert error["param"] == param
    assert param in str(error["message"])
    assert error["type"] == "invalid_request_error"


def test_an_unknown_field_is_offered_its_neighbour(server: Running) -> None:
    error = error_of(server.chat(repetition_penalti=1.1))
    assert "did you mean repetition_penalty?" in str(error["message"])


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True},
        {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "tool_choice": "auto"},
        {"temperature": None, "top_p": None, "stop": None, "seed": None, "logit_bias": None, "n": None},
        {"user": None, "deadline_ms": None},
        {"presence_penalty": -1.5, "frequency_penalty": -1.5, "logit_bias": {}},
    ],
)
def test_fields_that_change_nothing_are_taken(server: Running, fields: dict[str, object]) -> None:
    assert server.chat(**fields).status_code == 200


def test_an_assistant_message_of_ours_can_come_back(server: Running) -> None:
    message = server.chat().json()["choices"][0]["message"]
    extras = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None, "content": None}
    user = {"role": "user", "content": "And?"}
    for assistant in (message, {**message, **extras}, {"role": "assistant"}):
        assert server.chat(messages=[user, assistant, user]).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused(server: Running, number: str) -> None:
    body = json.dumps(chat_body(temperature="@")).replace('"@"', number)
    response = server.client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert error_of(response)["param"] == "temperature"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"model": "x", "messages": [', "application/json", 400),
        (b"", "application/json", 400),
        (b"[1, 2]", "application/json", 400),
        (b"3", "application/json", 400),
        (b'{"model":"\xff\xfe"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b"a=1&b=2", "application/x-www-form-urlencoded", 415),
        (b"{}", "text/plain", 415),
    ],
)
def test_a_broken_body_is_a_clean_error(server: Running, body: bytes, kind: str, status: int) -> None:
    response = server.client.post("/v1/chat/completions", content=body, headers={"content-type": kind})
    assert error_of(response, status)["message"]


def test_half_a_surrogate_pair_is_refused(server: Running) -> None:
    body = json.dumps(chat_body("half \ud83d only"))
    response = server.client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert "Unicode" in str(error_of(response)["message"])
    body = json.dumps(chat_body(**{"\ud83d": 1}))
    response = server.client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert "\\ud83d" not in response.text
    assert error_of(response)["message"]


def test_pictures_are_sent_to_their_own_route(server: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    error = error_of(server.chat([{"type": "text", "text": "What is it?"}, part]))
    assert "/v1/images/classify" in str(error["message"])
    assert server.chat("The text data:image/png;base64,AAAA is only quoted.").status_code == 200


@pytest.mark.parametrize("body", [b'{"a":' + b"[" * 100_000, b'{"seed":' + b"9" * 5000 + b"}", b'"\xff"'])
def test_json_that_python_cannot_read_is_refused_with_the_reason(server: Running, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = server.client.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert "nested too deeply" in answer.json()["error"]["message"]
