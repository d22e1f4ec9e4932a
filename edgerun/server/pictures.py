"""The pictures of a request, in any of the three ways they come: a form, a raw body, or JSON.

Only takes bytes apart; decoding is pixels' work. Pictures are never fetched from anywhere.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile

from edgerun.errors import InvalidImage, InvalidRequest
from edgerun.server.body import content_type_of

MAX_PICTURES = 64  # of one request
_PICTURE_FIELDS = ("file", "image", "images")
_FIELDS = (*_PICTURE_FIELDS, "model", "top_k")


@dataclass(frozen=True, slots=True)
class PicturesRequest:
    """pictures: the encoded bytes of each, or why one has none. top_k and model: None where not given."""

    pictures: tuple[bytes | InvalidImage, ...]
    model: str | None
    top_k: int | None


async def read_pictures(request: Request) -> PicturesRequest:
    """Raises InvalidRequest naming the field, or HTTPException 415 for another content type."""
    kind = content_type_of(request)
    if kind == "multipart/form-data":
        return await _read_form(request)
    if kind == "application/json":
        return _read_json(await request.body())
    if kind.startswith("image/") or kind in ("", "application/octet-stream"):
        fields = {key: str(value) for key, value in request.query_params.items()}
        _refuse_unknown(fields, ("model", "top_k"))
        return _checked([await request.body()], fields)
    raise HTTPException(
        415, f"the content type is {kind!r}; send multipart/form-data, image/*, or JSON with data URIs"
    )


async def _read_form(request: Request) -> PicturesRequest:
    fields: dict[str, str] = {}
    pictures: list[bytes | InvalidImage] = []
    # +1: one too many is counted by `_checked`, which says so in our words.
    async with request.form(max_files=MAX_PICTURES + 1, max_fields=16) as form:
        _refuse_unknown(dict(form), _FIELDS)
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name not in _PICTURE_FIELDS:
                    raise InvalidRequest(f"{name} must be a text, not a file", param=name)
                pictures.append(await value.read())
            elif name in _PICTURE_FIELDS:
                raise InvalidRequest(f"{name} must be an uploaded file, not a text", param=name)
            else:
                fields[name] = value
    return _checked(pictures, fields)


def _read_json(body: bytes) -> PicturesRequest:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the JSON body must be an object")
    _refuse_unknown(fields, _FIELDS)
    pictures: list[bytes | InvalidImage] = []
    for name in _PICTURE_FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        for uri in value if isinstance(value, list) else [value]:
            pictures.append(_from_data_uri(uri, name))
    return _checked(pictures, fields)


def _from_data_uri(uri: Any, name: str) -> bytes | InvalidImage:
    if not isinstance(uri, str):
        raise InvalidRequest(f"{name} must be a data URI or a list of them", param=name)
    head, comma, data = uri.partition(",")
    if not uri.startswith("data:"):
        raise InvalidRequest(
            f"{name} must be a data URI (data:image/png;base64,...); pictures are not fetched from addresses",
            param=name,
        )
    if not comma or not head.endswith(";base64"):
        return InvalidImage("the data URI has no base64 data: it must look like data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        return InvalidImage(f"the data URI is not valid base64: {error}")


def _checked(pictures: list[bytes | InvalidImage], fields: Mapping[str, Any]) -> PicturesRequest:
    if not pictures:
        raise InvalidRequest("there is no picture; send at least one as `file`", param="file")
    if len(pictures) > MAX_PICTURES:
        raise InvalidRequest(f"more than {MAX_PICTURES} pictures; send fewer at a time", param="file")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model must be a text", param="model")
    return PicturesRequest(tuple(pictures), model, _top_k(fields.get("top_k")))


def _top_k(value: Any) -> int | None:
    """An integer, or its digits where the field is a form's or a query's text."""
    if value is None:
        return None
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 9:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(
            f"top_k is {value!r}; it must be a whole number of at least 1"[:200], param="top_k"
        )
    return value


def _refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(fields) - set(known))
    if unknown:
        names = ", ".join(known)
        raise InvalidRequest(f"{unknown[0][:80]!r} is not a field of this route; there are {names}")
