"""POST /v1/chat/completions: a validated request becomes a prompt, its answer JSON or a stream of events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from edgerun.server.answers import AssistantMessage, ChatCompletion, Choice, ChunkWriter, UsageBody
from edgerun.server.body import needs_json
from edgerun.server.errors import json_response, request_id_of
from edgerun.server.generation import Answer, begin
from edgerun.server.models import ReadyLlm
from edgerun.server.openai import ChatMessage, ChatRequest
from edgerun.server.sse import EventStream, event, run_unless_gone
from edgerun.server.state import AppState, State
from edgerun.text.prompt import Prompt, SamplingParams

router = APIRouter()


@router.post("/v1/chat/completions", dependencies=[Depends(needs_json)], response_model=None)
async def chat_completions(body: ChatRequest, request: Request, state: State) -> Response:
    """Answer a chat, whole or (`stream`) as server-sent events."""
    if body.stream:
        return await run_unless_gone(request, _start_stream(body, request_id_of(request), state))
    return await run_unless_gone(request, _whole(body, state))


async def _whole(body: ChatRequest, state: AppState) -> Response:
    answer = await _begin(body, state)
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


async def _start_stream(body: ChatRequest, request_id: str, state: AppState) -> Response:
    """The stream, once its first event is there: what fails before is a status, not an event."""
    answer = await _begin(body, state)
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    writer = ChunkWriter(_new_id(), int(time.time()), body.model, has_usage)
    events = _events(answer, writer, has_usage)
    return EventStream(await anext(events), events, request_id)


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


async def _begin(body: ChatRequest, state: AppState) -> Answer:
    model = await state.models.llm(body.model)
    sampling = body.sampling_params(model.spec.llm.sampling)
    prompt = await render_prompt(model, body.messages, sampling, body.priority or 0)
    return await begin(state.engine, state.metrics, model, prompt, body.stop)


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
