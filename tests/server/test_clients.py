"""Who counts as one client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from edgerun.server.middleware import AccessRules, ApiKeys

from .harness import Running, chat_body, running

_ASK = """
import httpx, sys
client = httpx.Client(transport=httpx.HTTPTransport(uds=sys.argv[1]), base_url="http://localhost")
body = {"model": "parrot", "messages": [{"role": "user", "content": "hi"}]}
print(client.post("/v1/chat/completions", json=body).status_code)
"""


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as one:
        yield one


@pytest.fixture
def with_keys(tmp_path: Path) -> Iterator[Running]:
    path = tmp_path / "keys"
    path.write_text("sesame\nopen up\n")
    with running(rules=AccessRules(None, ApiKeys.read(path))) as one:
        yield one


def ask_tcp(server: Running, key: str = "", agent: str = "curl", **fields: object) -> str:
    """The client that the engine is told of for a chat over TCP."""
    headers = {"user-agent": agent} | ({"authorization": f"Bearer {key}"} if key else {})
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body(**fields), headers=headers)
    assert answer.status_code == 200, answer.text
    return server.engine.prompts[-1].client


def test_a_process_on_the_unix_socket_is_one_client(server: Running) -> None:
    for _ in range(2):
        server.chat()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://x") as other:
        other.post("/v1/chat/completions", json=chat_body())
    mine = {prompt.client for prompt in server.engine.prompts}
    assert mine == {f"process:{os.getpid()}"}
    subprocess.run([sys.executable, "-c", _ASK, str(server.socket)], check=True, timeout=60)
    assert server.engine.prompts[-1].client not in mine
    assert server.engine.prompts[-1].client.startswith("process:")


def test_over_tcp_address_and_program_make_a_client(server: Running) -> None:
    first = ask_tcp(server, agent="curl")
    assert first.startswith("host:")
    assert ask_tcp(server, agent="curl") == first
    assert ask_tcp(server, agent="script") != first


def test_a_key_is_a_client_and_is_not_shown(with_keys: Running) -> None:
    first = ask_tcp(with_keys, "sesame")
    assert first.startswith("key:")
    assert ask_tcp(with_keys, "sesame", agent="another") == first
    assert ask_tcp(with_keys, "open up") != first
    assert "sesame" not in first


def test_user_names_the_client_whichever_way_it_comes(server: Running) -> None:
    first = ask_tcp(server, user="ann@example.org")
    assert first.startswith("user:")
    server.chat(user="ann@example.org")
    assert server.engine.prompts[-1].client == first
    assert ask_tcp(server, user="bob") != first
    assert "ann" not in first


def test_an_empty_user_is_none(server: Running) -> None:
    assert ask_tcp(server, user="") == ask_tcp(server)


def test_users_of_another_key_are_others(with_keys: Running) -> None:
    assert ask_tcp(with_keys, "sesame", user="ann") == ask_tcp(with_keys, "sesame", user="ann")
    assert ask_tcp(with_keys, "sesame", user="ann") != ask_tcp(with_keys, "open up", user="ann")


def test_no_address_may_pass_for_a_process(server: Running) -> None:
    """uvicorn believes X-Forwarded-For of this machine."""
    headers = {"x-forwarded-for": "[process:1]"}
    httpx.post(f"{server.url}/v1/chat/completions", json=chat_body(), headers=headers)
    assert server.engine.prompts[-1].client.startswith("host:")
