"""POST /v1/chat/completions: a validated request becomes a prompt, its answer JSON or a stream of events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from edgerun.errors import DeadlineExceeded
from edgerun.server.answers import AssistantMessage, ChatCompletion, Choice, ChunkWriter, UsageBody
from edgerun.server.body import needs_json
from edgerun.server.clients import client_of
from edgerun.server.errors import json_response, request_id_of
from edgerun.server.generation import Answer, begin
from edgerun.server.models import ReadyLlm
from edgerun.server.openai import ChatMessage, ChatRequest
from edgerun.server.sse import EventStream, event, run_unless_gone
from edgerun.server.state import AppState, State
from edgerun.text.prompt import Prompt, SamplingParams

router = APIRouter()
_Result = TypeVar("_Result")


@router.post("/v1/chat/completions", dependencies=[Depends(needs_json)], response_model=None)
async def chat_completions(body: ChatRequest, request: Request, state: State) -> Response:
    """Answer a chat, whole or (`stream`) as server-sent events."""
    if body.stream:
        return await run_unless_gone(request, _start_stream(body, request, state))
    return await run_unless_gone(request, _whole(body, request, state))


async def _whole(body: ChatRequest, request: Request, state: AppState) -> Response:
    answer = await _begin(body, request, state)
    async with aclosing(answer.pieces()) as pieces:
        text = "".join([piece async for piece in pieces])
    completion = ChatCompletion(
        id=_new_id(),
        created=int(time.time()),
        model=body.model,
        choices=[Choice(AssistantMessage(text), answer.finish_reason or "stop")],
        usage=UsageBody.of(answer.usage),
    )
    return json_response(completion.encode())


async def _start_stream(body: ChatRequest, request: Request, state: AppState) -> Response:
    """The stream, once its first event is there: what fails before is a status, not an event."""
    answer = await _begin(body, request, state)
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    writer = ChunkWriter(_new_id(), int(time.time()), body.model, has_usage)
    events = _events(answer, writer, has_usage)
    return EventStream(await anext(events), events, request_id_of(request))


async def _events(answer: Answer, writer: ChunkWriter, has_usage: bool) -> AsyncGenerator[bytes, None]:
    """One write for each engine step that made text; the role goes out with the first."""
    async with aclosing(answer.pieces()) as pieces:
        first = await anext(pieces, "")
        yield event(writer.role()) + (event(writer.text(first)) if first else b"")
        async for piece in pieces:
            yield event(writer.text(piece))
    end = event(writer.finish(answer.finish_reason or "stop"))
    if has_usage:
        end += event(writer.usage(answer.usage))
    yield end + event(b"[DONE]")


async def _begin(body: ChatRequest, request: Request, state: AppState) -> Answer:
    """Hand the request to the engine with what is left of its deadline, which the engine keeps from there on.

    Raises DeadlineExceeded when nothing is left.
    """
    arrival_s = time.monotonic()
    model, prompt = await _within(body.deadline_ms, _prepare(body, state))
    left_s = 0.0  # no deadline
    if body.deadline_ms is not None:
        left_s = arrival_s + body.deadline_ms / 1000 - time.monotonic()
        if left_s <= 0:
            raise _too_late(body.deadline_ms)
    prompt = msgspec.structs.replace(prompt, client=client_of(request, body.user), deadline_s=left_s)
    return await begin(state.engine, state.metrics, model, prompt, body.stop)


async def _prepare(body: ChatRequest, state: AppState) -> tuple[ReadyLlm, Prompt]:
    model = await state.models.llm(body.model)  # may load it
    sampling = body.sampling_params(model.spec.llm.sampling)
    return model, await render_prompt(model, body.messages, sampling, body.priority or 0)


async def _within(deadline_ms: int | None, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`; when the deadline comes first, cancels it and raises DeadlineExceeded."""
    if deadline_ms is None:
        return await work
    working = asyncio.ensure_future(work)
    try:
        # Not asyncio.wait_for: before Python 3.12 it can lose a cancellation.
        await asyncio.wait({working}, timeout=deadline_ms / 1000)
        if not working.done():
            raise _too_late(deadline_ms)
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _too_late(deadline_ms: int) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the model was not ready within the deadline of {deadline_ms} ms; allow more, or load it before",
        deadline_s=deadline_ms / 1000,
    )


async def render_prompt(
    model: ReadyLlm,
    messages: list[ChatMessage],
    sampling: SamplingParams,
    priority: int = 0,
    *,
    add_generation_prompt: bool = True,
) -> Prompt:
    """Through the model's own template, in a thread: it is a stranger's program and may be slow."""
    rendered = await asyncio.to_thread(
        model.template.render,
        [message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
    )
    return Prompt(segments=rendered.segments, add_bos=rendered.add_bos, sampling=sampling, priority=priority)


def _new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"
