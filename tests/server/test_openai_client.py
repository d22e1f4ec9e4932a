"""The `openai` client as people use it, unmodified, over TCP and over the Unix socket."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from .fakes import FakeEngine
from .harness import Running, running

TEXT = "An oak, a birch and a fir."
MESSAGES = [{"role": "user", "content": "Name trees."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


def client_of(server: Running, way: str) -> openai.OpenAI:
    if way == "tcp":
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    http = httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)))
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture(params=["tcp", "unix"])
def client(request: pytest.FixtureRequest, server: Running) -> Iterator[openai.OpenAI]:
    with client_of(server, request.param) as one:
        yield one


def test_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["parrot", "rgb"]
    assert client.models.retrieve("parrot").id == "parrot"


def test_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="parrot", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(TEXT)
    back = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
    assert client.chat.completions.create(model="parrot", messages=back).choices


def test_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="parrot", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(TEXT)


def test_errors_are_exceptions_of_their_own_type(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="parrot", messages=MESSAGES, n=3)
    assert bad.value.param == "n"


def test_an_engine_that_dies_in_mid_stream_is_an_exception() -> None:
    with running(FakeEngine(crash_after_steps=3)) as server, client_of(server, "tcp") as client:
        chunks = client.chat.completions.create(model="parrot", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="engine process died"):
            list(chunks)


def test_leaving_a_stream_cancels_it() -> None:
    engine = FakeEngine(is_endless=True, step_s=0.001)
    with running(engine) as server, client_of(server, "unix") as client:
        chunks = client.chat.completions.create(model="parrot", messages=MESSAGES, stream=True)
        next(chunks)
        chunks.close()
        client.models.list()
        for _ in range(500):
            if engine.num_cancelled:
                break
            client.models.list()
    assert engine.num_cancelled == 1
