"""Every error as HTTP: one table from our error types to a status and OpenAI's error object.

Owns the wire shape `{"error": {"message", "type", "param", "code"}}`. What is not ours is a 500 that shows
the request id and nothing of the program.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from edgerun import errors

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 2000  # a message may quote what the client sent; it need not get all of it back


@dataclass(frozen=True, slots=True)
class Mapped:
    """status: HTTP; type and code: OpenAI's words; is_retryable: whether the same request may work soon."""

    status: int
    type: str
    code: str
    is_retryable: bool = False


# The nearest base class of an error decides (see `mapped`).
TABLE: Mapping[type[errors.EdgerunError], Mapped] = {
    errors.EdgerunError: Mapped(500, "server_error", "internal_error"),
    errors.ConfigError: Mapped(500, "server_error", "config_error"),
    errors.ModelError: Mapped(500, "server_error", "model_error"),
    errors.ModelNotFound: Mapped(404, "invalid_request_error", "model_not_found"),
    errors.ModelNotPulled: Mapped(404, "invalid_request_error", "model_not_pulled"),
    errors.InvalidModelFile: Mapped(500, "server_error", "invalid_model_file"),
    errors.ModelLoadFailed: Mapped(500, "server_error", "model_load_failed"),
    errors.PullFailed: Mapped(502, "server_error", "pull_failed"),
    errors.HashMismatch: Mapped(502, "server_error", "hash_mismatch"),
    errors.DeviceError: Mapped(503, "server_error", "device_error"),
    errors.ProviderUnavailable: Mapped(503, "server_error", "provider_unavailable"),
    errors.NativeLibraryMissing: Mapped(503, "server_error", "native_library_missing"),
    errors.RequestError: Mapped(400, "invalid_request_error", "invalid_request"),
    errors.InvalidRequest: Mapped(400, "invalid_request_error", "invalid_request"),
    errors.ContextLengthExceeded: Mapped(400, "invalid_request_error", "context_length_exceeded"),
    errors.InvalidImage: Mapped(400, "invalid_request_error", "invalid_image"),
    errors.QueueFull: Mapped(429, "rate_limit_error", "queue_full", is_retryable=True),
    errors.DeadlineExceeded: Mapped(504, "deadline_exceeded", "deadline_exceeded"),
    errors.EngineLost: Mapped(503, "server_error", "engine_lost", is_retryable=True),
}

_CODES_OF_STATUS = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}
_DEFAULT_PARAMS: Mapping[type[errors.EdgerunError], str] = {
    errors.ModelNotFound: "model",
    errors.ModelNotPulled: "model",
    errors.ContextLengthExceeded: "messages",
}
_OBJECT_WANTED = ("model_type", "model_attributes_type", "dict_type")


def mapped(error: errors.EdgerunError) -> Mapped:
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """The JSON of an error answer. Lone surrogates in what a client sent become question marks."""
    text = message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."
    fields = {"message": text, "type": kind, "param": param, "code": code}
    body = json.dumps({"error": fields}, ensure_ascii=False, separators=(",", ":"))
    return body.encode("utf-8", "replace")


def body_of(error: errors.EdgerunError) -> bytes:
    """The error object of one of our errors; also the data of an error event in a stream."""
    how = mapped(error)
    param = error.details.get("param", _DEFAULT_PARAMS.get(type(error)))
    code = error.details.get("code", how.code)
    return error_body(error.message, how.type, _text_or_none(param), _text_or_none(code))


def response_of(error: errors.EdgerunError) -> Response:
    how = mapped(error)
    headers = {}
    if how.is_retryable:
        wait_s = error.details.get("retry_after_s")
        headers["retry-after"] = str(max(1, math.ceil(wait_s)) if isinstance(wait_s, int | float) else 1)
    elif how.status >= 500:
        # The openai clients repeat a 5xx by themselves; a broken model file does not mend in a second.
        headers["x-should-retry"] = "false"
    return json_response(body_of(error), how.status, headers)


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers=headers, media_type="application/json")


def http_error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error that HTTP itself knows: no such route, not allowed, too large."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = _CODES_OF_STATUS.get(status)
    return json_response(error_body(message, kind, None, code), status, headers)


def describe_validation(found: Sequence[Mapping[str, Any]], known: Sequence[str]) -> tuple[str, str | None]:
    """(message, param) of pydantic's findings; the first is the one to mend first.

    known: the names of the body's fields, to offer the nearest for one that does not exist.
    """
    first = found[0]
    path = _field_path(first["loc"])
    kind = first["type"]
    if kind == "json_invalid":
        return f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    if kind == "missing":
        return (f"{path} is required" if path else "the body is empty; send a JSON object"), path
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        return f"{path} is not a field that edgerun honours; {hint}", path
    message = "must be an object" if kind in _OBJECT_WANTED else str(first["msg"])
    message = message.replace("Input should be", "must be")
    if path is None:
        return f"the JSON body {message}", None
    # Our own messages are predicates ("must be ..."); what is left of pydantic's are sentences.
    return f"{path}{' ' if message[0].islower() else ': '}{message}", path


def install(app: FastAPI) -> None:
    """Make every error of `app` an OpenAI error object."""
    app.add_exception_handler(errors.EdgerunError, _on_edgerun_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_edgerun_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.EdgerunError)
    if mapped(error).status >= 500:
        logger.warning("%s %s: %s", request.url.path, type(error).__name__, error.message)
    return response_of(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    known = _body_field_names(request)
    message, param = describe_validation(error.errors(), known)
    return json_response(error_body(message, "invalid_request_error", param, "invalid_request"), 400)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if message == "There was an error parsing the body":  # FastAPI's, for what json.loads refuses oddly
        message = "the body cannot be read as JSON: no UTF-8, nested too deeply, or too long a number"
    elif error.status_code == 404:
        message = f"no route {request.method} {request.url.path}; GET /openapi.json lists what there is"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    return http_error_response(error.status_code, message, error.headers)


def request_id_of(request: Request) -> str:
    """The id that the answer's x-request-id header carries."""
    return str(request.scope.get("edgerun.request_id", "-"))


def _body_field_names(request: Request) -> list[str]:
    body_field = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body_field, "field_info", None), "annotation", None)
    return list(getattr(model, "model_fields", {}))


def _field_path(loc: Sequence[str | int]) -> str | None:
    """("body", "messages", 0, "role") -> "messages[0].role"; None for the body as a whole."""
    parts = list(loc[1:]) if loc and loc[0] in ("body", "query", "path") else list(loc)
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text[:200] or None


def _text_or_none(value: errors.Detail) -> str | None:
    return None if value is None else str(value)
