"""Server-sent events, and noticing that a client has left.

Knows nothing of what is streamed. A client that leaves cancels the work at its next await, so that the
work's own `finally` can free what it holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgerun.errors import EdgerunError
from edgerun.server.errors import body_of

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_EVENT_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


def event(data: bytes) -> bytes:
    """One event. `data` is JSON or [DONE]: it holds no line break."""
    return b"data: " + data + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Return when the client has left. Call it after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; when the client leaves first, cancels it and raises ClientGone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


class EventStream(Response):
    """Sends `first` and then each of `events` as one write; closes the generator when all is sent or the
    client leaves. A generator that was never started does not run its `finally`: start it to get `first`.

    An error after the first byte becomes an event `{"error": {...}}`, which the openai clients raise as an
    exception; the stream then ends without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], request_id: str) -> None:
        super().__init__(headers=_EVENT_HEADERS)
        del self.headers["content-length"]  # its length is not known yet
        self._first = first
        self._events = events
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            was_sent = sending.done()
            sending.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)
            await self._events.aclose()
        if was_sent:
            sending.result()

    async def _send_all(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(head)
        try:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # the status is sent: the client can only be told in the stream
            data = event(body_of(self._as_ours(error)))
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _as_ours(self, error: Exception) -> EdgerunError:
        if isinstance(error, EdgerunError):
            logger.info("a stream ended with %s: %s", type(error).__name__, error.message)
            return error
        logger.error("a stream failed", exc_info=error)
        return EdgerunError(f"internal error; the server's log has more under request id {self._request_id}")
