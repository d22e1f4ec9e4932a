"""The OpenAI wire format of answers, as structs that msgspec writes fast.

A streamed answer costs one small encode per engine step; the fields that never change are set once.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from edgerun.server.generation import Usage

_encoder = msgspec.json.Encoder()


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        return cls(
            prompt_tokens=usage.num_prompt_tokens,
            completion_tokens=usage.num_completion_tokens,
            total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
            prompt_tokens_details=CachedTokens(usage.num_cached_tokens),
        )


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    message: AssistantMessage
    finish_reason: str
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # seconds since 1970
    model: str
    choices: list[Choice]
    usage: UsageBody

    def encode(self) -> bytes:
        return _encoder.encode(self)


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """usage: absent unless the client asked for it; then null in all chunks but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


class ChunkWriter:
    """Writes the chunks of one streamed answer: one id, one time, one model throughout."""

    def __init__(self, completion_id: str, created: int, model: str, has_usage: bool) -> None:
        self._id = completion_id
        self._created = created
        self._model = model
        self._usage: UnsetType | None = None if has_usage else UNSET

    def role(self) -> bytes:
        return self._write([ChunkChoice(Delta(role="assistant", content=""))])

    def text(self, text: str) -> bytes:
        return self._write([ChunkChoice(Delta(content=text))])

    def finish(self, reason: str) -> bytes:
        return self._write([ChunkChoice(Delta(), finish_reason=reason)])

    def usage(self, usage: Usage) -> bytes:
        return self._write([], UsageBody.of(usage))

    def _write(self, choices: list[ChunkChoice], usage: UsageBody | None = None) -> bytes:
        return _encoder.encode(
            ChatChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=self._usage if usage is None else usage,
            )
        )
