"""Event streams and clients that leave, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from edgerun.errors import EngineLost
from edgerun.server.sse import EventStream, event


def send_stream(events: AsyncGenerator[bytes, None], *, leaves: bool = False) -> list[Message]:
    """What an EventStream sends to a client that stays, or to one that has left already."""
    sent: list[Message] = []

    async def receive() -> Message:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        await asyncio.sleep(0)

    async def scenario() -> None:
        first = await anext(events)
        await EventStream(first, events, "req-1")({"type": "http"}, receive, send)

    asyncio.run(scenario())
    return sent


def body_of(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


def test_each_event_is_one_write_and_the_end_is_told() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for text in (b"1", b"2", b"3"):
            yield event(text)

    sent = send_stream(events())
    assert [message.get("body") for message in sent[1:]] == [
        b"data: 1\n\n",
        b"data: 2\n\n",
        b"data: 3\n\n",
        b"",
    ]
    assert sent[-1]["more_body"] is False
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers


@pytest.mark.parametrize(
    ("error", "code"), [(EngineLost("gone"), "engine_lost"), (ZeroDivisionError("secret"), "internal_error")]
)
def test_an_error_becomes_an_event_and_the_stream_ends(error: Exception, code: str) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield event(b"1")
        raise error

    sent = send_stream(events())
    last = json.loads(body_of(sent).split(b"data: ")[-1])
    assert last["error"]["code"] == code
    assert "secret" not in last["error"]["message"]
    assert sent[-1]["more_body"] is False


@pytest.mark.parametrize("leaves", [True, False])
def test_the_generator_is_closed_whatever_happens(leaves: bool) -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield event(b"1")
            yield event(b"2")
            if leaves:
                await asyncio.Event().wait()
        finally:
            closed.append(True)

    send_stream(events(), leaves=leaves)
    assert closed == [True]
