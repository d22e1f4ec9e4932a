"""POST /tokenize and /detokenize in vLLM's shape: token counts before sending."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from edgerun.errors import InvalidRequest
from edgerun.server.body import needs_json
from edgerun.server.chat import render_prompt
from edgerun.server.errors import json_response
from edgerun.server.models import ReadyLlm
from edgerun.server.openai import DetokenizeRequest, TokenizeRequest
from edgerun.server.sse import run_unless_gone
from edgerun.server.state import AppState, State
from edgerun.text.prompt import Prompt, SamplingParams, Segment

router = APIRouter()


@router.post("/tokenize", dependencies=[Depends(needs_json)], response_model=None)
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> Response:
    """Token ids of a prompt, or of messages after the model's chat template."""
    return await run_unless_gone(request, _tokenize(body, state))


async def _tokenize(body: TokenizeRequest, state: AppState) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    model = await _model(body.model, state)
    if body.messages is not None:
        prompt = await render_prompt(
            model, body.messages, SamplingParams(), add_generation_prompt=body.add_generation_prompt
        )
    else:
        # A text of the user's: never read for control tokens.
        segments = (Segment(body.prompt or "", special=False),)
        prompt = Prompt(segments=segments, add_bos=body.add_special_tokens and model.info.add_bos)
    tokens = await state.engine.tokenize(model.spec.name, prompt)
    answer = {
        "count": len(tokens),
        "max_model_len": model.info.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    return json_response(msgspec.json.encode(answer))


@router.post("/detokenize", dependencies=[Depends(needs_json)], response_model=None)
async def detokenize(body: DetokenizeRequest, request: Request, state: State) -> Response:
    """The text of token ids. Control tokens have none; bytes that are no UTF-8 become U+FFFD."""
    model = await run_unless_gone(request, _model(body.model, state))
    pieces = model.info.pieces
    unknown = next((token for token in body.tokens if token >= len(pieces)), None)
    if unknown is not None:
        raise InvalidRequest(
            f"there is no token {unknown}; {model.spec.name} has {len(pieces)} tokens", param="tokens"
        )
    text = b"".join(pieces[token] for token in body.tokens).decode("utf-8", "replace")
    return json_response(msgspec.json.encode({"prompt": text}))


async def _model(name: str | None, state: AppState) -> ReadyLlm:
    return await state.models.llm(await state.models.default_name("llm") if name is None else name)
