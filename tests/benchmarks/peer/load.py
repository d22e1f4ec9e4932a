"""A load of chats against any OpenAI-compatible server, and the figures of it. Knows no particular server.

Everything that comes in is stamped and kept; it is parsed when the load is over, so that the client takes
little from the cores that it shares with the server.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Chat:
    """One request. leave_after: events of text after which the client hangs up; 0: it stays."""

    system: str
    user: str
    max_tokens: int
    tag: str = ""
    start_after_s: float = 0.0
    leave_after: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one chat. Times are of time.perf_counter.

    events_s: when each event with text came; a server may put several tokens into one event, or none.
    """

    chat: Chat
    sent_s: float
    ended_s: float
    events_s: tuple[float, ...] = ()
    text: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    error: str = ""
    has_left: bool = False

    @property
    def ttft_s(self) -> float:
        return self.events_s[0] - self.sent_s if self.events_s else math.nan

    @property
    def itls_s(self) -> list[float]:
        """Seconds between neighbouring events."""
        return [b - a for a, b in zip(self.events_s, self.events_s[1:], strict=False)]

    @property
    def tokens_per_s(self) -> float:
        """From the first event to the last."""
        if len(self.events_s) < 2:
            return math.nan
        return (self.num_completion_tokens - 1) / (self.events_s[-1] - self.events_s[0])


@dataclass(frozen=True, slots=True)
class Load:
    """All outcomes of one load, in the order of its chats. cpu_s: of the server, while the load ran."""

    outcomes: tuple[Outcome, ...]
    wall_s: float
    cpu_s: float

    def tagged(self, tag: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.chat.tag == tag]

    @property
    def finished(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.finish_reason and not one.error]

    @property
    def errors(self) -> list[str]:
        return [one.error for one in self.outcomes if one.error]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(one.num_prompt_tokens for one in self.outcomes)

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that did not come from a cache, by `usage`."""
        return self.num_prompt_tokens - sum(one.num_cached_tokens for one in self.outcomes)

    @property
    def num_completion_tokens(self) -> int:
        return sum(one.num_completion_tokens for one in self.outcomes)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answers by the wall time of the load."""
        return self.num_completion_tokens / self.wall_s

    def ttft_s(self, share: float, tag: str = "") -> float:
        return quantile([one.ttft_s for one in self.tagged(tag)], share)

    def itl_s(self, share: float, tag: str = "") -> float:
        return quantile([gap for one in self.tagged(tag) for gap in one.itls_s], share)


def quantile(values: Iterable[float], share: float) -> float:
    """The value at `share` (0 to 1) of the sorted values, the nearest one; NaN for none."""
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[round(share * (len(ordered) - 1))] if ordered else math.nan


def run_chats(url: str, model: str, chats: Sequence[Chat], max_concurrent: int = 0) -> tuple[Outcome, ...]:
    """All chats at once, or at most `max_concurrent` of them at a time, in their order."""
    return asyncio.run(_run_chats(url, model, chats, max_concurrent or len(chats)))


async def _run_chats(url: str, model: str, chats: Sequence[Chat], max_concurrent: int) -> tuple[Outcome, ...]:
    # A connection for each chat: llama-server closes kept ones at its own times, which looks like a failure.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    gate = asyncio.Semaphore(max_concurrent)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False) as http:

        async def gated(chat: Chat) -> _Received:
            async with gate:
                await asyncio.sleep(chat.start_after_s)
                return await _stream(http, model, chat)

        received = await asyncio.gather(*(gated(chat) for chat in chats))
    return tuple(one.outcome() for one in received)


async def _stream(http: httpx.AsyncClient, model: str, chat: Chat) -> _Received:
    body = {
        "model": model,
        "messages": [{"role": "system", "content": chat.system}, {"role": "user", "content": chat.user}],
        "max_tokens": chat.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        # llama-server never samples an end token then; ours does, as vLLM, and sends no event for it, which
        # would look like a gap of two steps. With min_tokens it never does either.
        "min_tokens": chat.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    received = _Received(chat, time.perf_counter())
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                received.error = f"status {response.status_code}: {text[:200]}"
            else:
                async for data in response.aiter_raw():
                    received.pieces.append((time.perf_counter(), data))
                    if chat.leave_after and received.is_enough():
                        received.has_left = True
                        break
    except httpx.HTTPError as error:
        received.error = repr(error)[:200]
    received.ended_s = time.perf_counter()
    return received


@dataclass(slots=True)
class _Received:
    """The raw bytes of one answer, as they came."""

    chat: Chat
    sent_s: float
    ended_s: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""
    has_left: bool = False

    def is_enough(self) -> bool:
        return sum(data.count(b'"content":"') for _, data in self.pieces) >= self.chat.leave_after

    def outcome(self) -> Outcome:
        parsed = parse_events(self.pieces)
        error = self.error or parsed.error
        if not error and not self.has_left and not parsed.is_done:
            error = "the stream ended without [DONE]"
        return Outcome(
            self.chat,
            self.sent_s,
            self.ended_s,
            tuple(parsed.events_s),
            parsed.text,
            parsed.finish_reason,
            parsed.usage.get("prompt_tokens", 0),
            (parsed.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            parsed.usage.get("completion_tokens", len(parsed.events_s)),  # no usage where the client left
            error,
            self.has_left,
        )


@dataclass(slots=True)
class ParsedEvents:
    """The events of one answer. usage: as it came on the wire."""

    events_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_done: bool = False

    def add(self, at_s: float, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        body = json.loads(data)
        if body.get("error"):
            self.error = str(body["error"])[:200]
        self.usage = body.get("usage") or self.usage
        for choice in body.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if piece := (choice.get("delta") or {}).get("content"):
                self.events_s.append(at_s)
                self.text += piece


def parse_events(pieces: Sequence[tuple[float, bytes]]) -> ParsedEvents:
    """Server-sent events from (time, bytes) as read; an event's time is that of its last byte."""
    parsed = ParsedEvents()
    rest = b""
    for at_s, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                parsed.add(at_s, line[5:].decode().strip())
            elif line.startswith(b"error:"):  # llama-server's way to end a stream that failed
                parsed.error = line[6:].decode(errors="replace").strip()[:200]
    return parsed
