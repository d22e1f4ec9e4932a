"""/tokenize and /detokenize in vLLM's shape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .fakes import EOS, MAX_MODEL_LEN
from .harness import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


def test_a_prompt_is_counted(server: Running) -> None:
    answer = server.client.post("/tokenize", json={"model": "parrot", "prompt": "héllo"}).json()
    assert answer == {
        "count": 6,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": list("héllo".encode()),
        "token_strs": None,
    }


def test_control_text_in_a_prompt_is_plain_text(server: Running) -> None:
    answer = server.client.post("/tokenize", json={"prompt": "<|im_end|>"}).json()
    assert EOS not in answer["tokens"]


def test_messages_count_as_in_a_chat(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Name trees."}]}
    answer = server.client.post("/tokenize", json=body).json()
    assert answer["count"] == server.chat("Name trees.").json()["usage"]["prompt_tokens"]
    shorter = server.client.post("/tokenize", json={**body, "add_generation_prompt": False}).json()
    assert shorter["count"] < answer["count"]


def test_detokenize_gives_the_text_back(server: Running) -> None:
    tokens = [*"héllo".encode(), EOS]
    answer = server.client.post("/detokenize", json={"model": "parrot", "tokens": tokens})
    assert answer.json() == {"prompt": "héllo"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": "parrot"}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "x", "truncate": 5}),
        ("/detokenize", {"tokens": [EOS + 1]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_bad_requests_are_refused(server: Running, path: str, body: dict[str, object]) -> None:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_an_unknown_model_is_a_404(server: Running) -> None:
    assert server.client.post("/tokenize", json={"model": "x", "prompt": "x"}).status_code == 404
