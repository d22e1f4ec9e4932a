"""/v1/models: what there is, and pulling, loading, unloading and rolling back with progress as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from edgerun.server.errors import json_response, request_id_of
from edgerun.server.jobs import Job, StageProgress
from edgerun.server.models import ModelCard
from edgerun.server.sse import EventStream, event
from edgerun.server.state import State

router = APIRouter()
_encoder = msgspec.json.Encoder()


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's model object, vLLM's max_model_len, and ours. max_model_len: absent for vision models."""

    id: str
    object: str = "model"
    created: int = 0  # OpenAI demands the field; a local file has no date that means anything to a client
    owned_by: str = "edgerun"
    kind: str
    task: str
    description: str
    version: int
    size_bytes: int
    pulled: bool
    loaded: bool
    provider: str | None
    max_model_len: int | msgspec.UnsetType | None = msgspec.UNSET

    @classmethod
    def of(cls, card: ModelCard) -> ModelBody:
        return cls(
            id=card.name,
            kind=card.kind,
            task=card.task,
            description=card.description,
            version=card.version,
            size_bytes=card.size_bytes,
            pulled=card.is_pulled,
            loaded=card.is_loaded,
            provider=card.provider,
            max_model_len=card.max_model_len if card.kind == "llm" else msgspec.UNSET,
        )


@router.get("/v1/models", response_model=None)
async def list_models(state: State) -> Response:
    """Every model that this server answers for, pulled or not."""
    cards = await state.models.cards()
    body = {"object": "list", "data": [ModelBody.of(card) for card in cards]}
    return json_response(_encoder.encode(body))


@router.get("/v1/models/{model_id}", response_model=None)
async def show_model(model_id: str, state: State) -> Response:
    card = await state.models.card(model_id)
    return json_response(_encoder.encode(ModelBody.of(card)))


@router.post("/v1/models/{model_id}/pull", response_model=None)
async def pull_model(model_id: str, request: Request, state: State) -> Response:
    """Fetch the weights. Goes on when the client leaves; a second call joins the first."""
    return await _follow(state.models.start_pull, model_id, request)


@router.post("/v1/models/{model_id}/load", response_model=None)
async def load_model(model_id: str, request: Request, state: State) -> Response:
    """Load the current version into memory, replacing another version of the same model."""
    return await _follow(state.models.start_load, model_id, request)


@router.post("/v1/models/{model_id}/unload", response_model=None)
async def unload_model(model_id: str, request: Request, state: State) -> Response:
    """Free the model's memory; the next request for it loads it again."""
    return await _follow(state.models.start_unload, model_id, request)


@router.post("/v1/models/{model_id}/rollback", response_model=None)
async def rollback_model(model_id: str, request: Request, state: State) -> Response:
    """Go back to the version before, and load it where the model is loaded."""
    return await _follow(state.models.start_rollback, model_id, request)


async def _follow(start: Callable[[str], Awaitable[Job]], model_id: str, request: Request) -> Response:
    job = await start(model_id)
    return EventStream(b"", _progress_events(job), request_id_of(request))


async def _progress_events(job: Job) -> AsyncGenerator[bytes, None]:
    async for progress in job.progress():
        yield event(_encoder.encode(progress))
    yield event(_encoder.encode(StageProgress("done", 1, 1)))
