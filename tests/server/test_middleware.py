"""Request ids, who may ask over TCP, and how much may be sent."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from edgerun.errors import ConfigError
from edgerun.server.middleware import MAX_JSON_BYTES, AccessRules, ApiKeys

from .harness import running


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_bytes("\ufeffsesame\r\n# ours\r\n\r\n open up \r\nschlüssel\r\n".encode())
    return ApiKeys.read(path)


def test_every_answer_has_a_request_id() -> None:
    with running() as server:
        first = server.client.get("/health").headers["x-request-id"]
        assert server.client.get("/nowhere").headers["x-request-id"] not in ("", first)
        chosen = server.client.get("/health", headers={"x-request-id": "mine-7"})
        assert chosen.headers["x-request-id"] == "mine-7"
        strange = server.client.get("/health", headers={"x-request-id": "no good"})
        assert strange.headers["x-request-id"] != "no good"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8484", "LOCALHOST:1", "[::1]:8484"])
def test_this_machines_names_are_answered(host: str) -> None:
    with running() as server:
        assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8484",
        "localhost.evil.example",
        "evil.example@localhost",
        "localhost/evil.example",
        "[",
        "",
    ],
)
def test_another_host_is_refused(host: str) -> None:
    with running() as server:
        answer = httpx.get(f"{server.url}/v1/models", headers={"host": host})
    assert answer.status_code in (400, 403)


def test_a_page_of_another_origin_is_refused() -> None:
    with running() as server:
        pages = (server.url, 200), ("http://evil.example", 403), ("null", 403), ("http://[", 403), ("", 403)
        for origin, status in pages:
            answer = httpx.get(f"{server.url}/v1/models", headers={"origin": origin})
            assert answer.status_code == status
            assert "x-request-id" in answer.headers
        other_port = httpx.get(f"{server.url}/v1/models", headers={"origin": "http://127.0.0.1:1"})
        assert other_port.status_code == 403


def test_the_unix_socket_needs_neither_host_nor_key(keys: ApiKeys) -> None:
    with running(rules=AccessRules(keys=keys)) as server:
        headers = {"host": "anything", "origin": "http://anything.else"}
        assert server.client.get("/v1/models", headers=headers).status_code == 200


def test_keys_are_asked_for_over_tcp(keys: ApiKeys) -> None:
    with running(rules=AccessRules(None, keys)) as server:

        def status(authorization: str | None, path: str = "/v1/models") -> int:
            headers = {"host": b"box.lan"}
            headers |= {"authorization": authorization.encode()} if authorization else {}
            return httpx.get(f"{server.url}{path}", headers=headers).status_code

        assert status("Bearer sesame") == 200
        assert status("bearer open up") == 200
        assert status("Bearer schlüssel") == 200
        for wrong in (None, "Bearer", "sesame", "Bearer sesam", "Bearer # ours", "Basic sesame"):
            assert status(wrong) == 401
        assert status(None, "/health") == 200
        assert status(None, "/metrics") == 401


def test_keys_are_not_shown(keys: ApiKeys) -> None:
    assert "sesame" not in repr(keys)
    assert "sesame" not in repr(AccessRules(keys=keys))


def test_a_key_file_without_keys_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        ApiKeys.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.read(tmp_path / "absent")


@pytest.mark.parametrize("is_announced", [True, False])
def test_too_large_a_body_is_a_413(is_announced: bool) -> None:
    size = MAX_JSON_BYTES + 1
    content = b" " * size if is_announced else iter([b" " * 2**20] * (size // 2**20 + 1))
    with running() as server:
        answer = server.client.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert server.client.get("/health").status_code == 200
