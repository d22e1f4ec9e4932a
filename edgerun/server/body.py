"""What a request's body must be before its fields are looked at."""

from __future__ import annotations

from fastapi import HTTPException, Request


def content_type_of(request: Request) -> str:
    """The media type in small letters, without parameters; "" if none is given."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def needs_json(request: Request) -> None:
    """For JSON routes, as a dependency. A form (curl's default) would otherwise fail with a riddle."""
    kind = content_type_of(request)
    if kind != "application/json" and not kind.endswith("+json"):
        seen = f"{kind!r}"[:100] if kind else "none"
        raise HTTPException(415, f"the content type is {seen}; send JSON with Content-Type: application/json")
