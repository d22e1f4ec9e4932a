"""/health, /ready, /metrics, /v1/device: how this server is."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from edgerun import __version__
from edgerun.device.telemetry import read_load
from edgerun.engine.messages import Loaded
from edgerun.server.errors import json_response
from edgerun.server.state import State

router = APIRouter()


@router.head("/health", include_in_schema=False, response_model=None)
@router.get("/health", response_model=None)
async def health(state: State) -> Response:
    """Alive: answers also while the engine is busy, restarting or gone."""
    body = {"status": "ok", "server": "edgerun", "version": __version__, "engine": state.engine.state}
    return json_response(msgspec.json.encode(body))


@router.head("/ready", include_in_schema=False, response_model=None)
@router.get("/ready", response_model=None)
async def ready(state: State) -> Response:
    """200 when a request can be answered now, else 503 with the reason."""
    reason = state.readiness.reason or state.engine.trouble
    status = "not ready" if reason else "ready"
    body = {"status": status, "reason": reason or None}
    return json_response(msgspec.json.encode(body), 503 if reason else 200)


@router.get("/metrics", response_model=None)
async def metrics(state: State) -> Response:
    """Prometheus text."""
    return Response(await state.metrics.render(state.engine), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/device", response_model=None)
async def device(state: State) -> Response:
    """The probe's report, the load of this moment, and what really runs where."""
    load = await asyncio.to_thread(read_load, state.device)
    loaded = list(state.engine.loaded.values())
    slots = [model.llm.max_num_seqs for model in loaded if model.llm is not None]
    body = {
        **state.device.to_json(),
        "load": load.to_json(),
        "models": [_model(model) for model in loaded],
        "models_size_bytes": sum(model.size_bytes for model in loaded),
        "engine": {
            "pid": state.engine.pid,
            "state": state.engine.state,
            "reason": state.engine.trouble or None,
        },
        "scheduler": {"max_num_seqs": max(slots, default=None)},
    }
    return json_response(msgspec.json.encode(body))


def _model(model: Loaded) -> dict[str, Any]:
    return {
        "name": model.model,
        "kind": "llm" if model.llm is not None else "vision",
        "version": model.version,
        "provider": model.provider,
        "reason": model.reason,
        "size_bytes": model.size_bytes,
        "max_num_seqs": model.llm.max_num_seqs if model.llm else None,
    }
