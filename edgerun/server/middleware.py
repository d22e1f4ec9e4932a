"""What happens around every request: its id, who may ask, how much may be sent.

Plain ASGI, outermost first as `app.py` stacks them. Starlette's BaseHTTPMiddleware is not used: it hides a
client's leaving from the handlers.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgerun import log
from edgerun.errors import ConfigError
from edgerun.server.errors import error_body, http_error_response, json_response

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 8 * 2**20  # text only; far more than any context takes
MAX_IMAGES_BYTES = 96 * 2**20  # a batch of photos, or the same in base64
_OPEN_PATHS = ("/health", "/ready")  # what a load balancer asks without a key
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST = re.compile(r"(\[(?P<v6>[^\]]*)\]|(?P<name>[^:@/?#\[\]]*))(:[0-9]*)?")


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Digests of the keys that are let in; the keys themselves are kept nowhere and never logged."""

    digests: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """One key a line; blank lines and lines that begin with # are skipped. Raises ConfigError."""
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read the API keys in {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the API keys in {path} are no UTF-8 text: {error.reason}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigError(f"{path} holds no API key; write one a line")
        return cls(tuple(_digest(key.encode()) for key in keys))

    def accept(self, authorization: str) -> bool:
        """Whether an Authorization header carries one of the keys; takes the same time for each."""
        given = _given(authorization)
        matches = [hmac.compare_digest(given, known) for known in self.digests]
        return any(matches)


def _given(authorization: str) -> bytes:
    """The digest of the key in an Authorization header, or of nothing."""
    scheme, _, key = authorization.partition(" ")
    # Starlette reads the bytes of a header as Latin-1; clients send UTF-8.
    return _digest(key.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who may ask over TCP. The Unix socket is guarded by its file permissions instead.

    hosts: names that the Host header may carry, None: any (then keys are demanded, which a page that
    rebinds its own name cannot know).
    """

    hosts: frozenset[str] | None = frozenset({"localhost", "127.0.0.1", "::1"})
    keys: ApiKeys | None = None


class RequestIdMiddleware:
    """Give each request an id, put it on the answer, and turn a bug into a 500 that names only the id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["edgerun.request_id"] = request_id
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with log.request_id(request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                logger.exception("%s %s failed", scope["method"], scope["path"])
                if is_started:
                    raise  # too late for a status; the connection is closed
                message = f"internal error; the server's log has more under request id {request_id}"
                answer = json_response(error_body(message, "server_error", None, "internal_error"), 500)
                await answer(scope, receive, send_with_id)


class AccessMiddleware:
    """Check Host, Origin and the API key of requests that came over TCP.

    Puts a short hash of the key, where keys are asked for, into the scope as edgerun.key (see clients).
    """

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_tcp(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        status, reason = self._refusal(headers, scope["path"])
        if not status:
            if self._rules.keys is not None:
                scope["edgerun.key"] = _given(headers.get("authorization", "")).hex()[:16]
            await self._app(scope, receive, send)
            return
        answer_headers = {"www-authenticate": "Bearer"} if status == 401 else None
        await http_error_response(status, reason, answer_headers)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> tuple[int, str]:
        """(status, reason), or (0, "") to let it through."""
        host = _host_name(headers.get("host", ""))
        if self._rules.hosts is not None and host not in self._rules.hosts:
            named = headers.get("host", "")[:200]
            return 403, f"the Host header names {named!r}, which this server does not answer for"
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower():
            return 403, f"a page of {origin!r} may not use this server from a browser"
        keys = self._rules.keys
        if keys is None or path in _OPEN_PATHS or keys.accept(headers.get("authorization", "")):
            return 0, ""
        return 401, "this server needs an API key: send it as 'Authorization: Bearer KEY'"


class BodyLimitMiddleware:
    """Refuse a body over the limit with 413, before it is read where its length is announced."""

    def __init__(self, app: ASGIApp, image_paths: Sequence[str]) -> None:
        self._app = app
        self._image_paths = frozenset(image_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = MAX_IMAGES_BYTES if scope["path"] in self._image_paths else MAX_JSON_BYTES
        reason = f"the body is over {limit // 2**20} MiB; send less at a time"
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit:
            # The rest of the body is not read, so the connection cannot be used again.
            answer = http_error_response(413, reason, {"connection": "close"})
            await answer(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise HTTPException(413, reason, {"connection": "close"})
            return message

        await self._app(scope, counted, send)


def _is_tcp(scope: Scope) -> bool:
    server = scope.get("server")
    return server is not None and server[1] is not None


def _host_name(host: str) -> str:
    """The name in a Host header, in small letters, without port and brackets; "" if there is none."""
    found = _HOST.fullmatch(host)
    return (found["v6"] or found["name"]).lower() if found else ""
