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
from edgerun.engine.messages import LlmInfo, LlmStats, Loaded, Stats
from edgerun.server.errors import json_response
from edgerun.server.metrics import kv_cache_usage, read_stats
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
    load, stats = await asyncio.gather(asyncio.to_thread(read_load, state.device), read_stats(state.engine))
    loaded = list(state.engine.loaded.values())
    llm_stats = stats.llm if stats is not None else {}
    body = {
        **state.device.to_json(),
        "load": load.to_json(),
        "models": [_model(model, llm_stats.get(model.model)) for model in loaded],
        "models_size_bytes": sum(model.size_bytes for model in loaded),
        "engine": {
            "pid": state.engine.pid,
            "state": state.engine.state,
            "reason": state.engine.trouble or None,
        },
        "scheduler": _scheduler(loaded, stats),
    }
    return json_response(msgspec.json.encode(body))


def _scheduler(loaded: list[Loaded], stats: Stats | None) -> dict[str, Any]:
    """Of all language models together; null: nothing is loaded, or the engine does not say.

    max_num_seqs and kv_cache_usage are those of the model with the most.
    """
    infos = [model.llm for model in loaded if model.llm is not None]
    now = list(stats.llm.values()) if stats is not None else None
    return {
        "max_num_seqs": max((info.max_num_seqs for info in infos), default=None),
        "num_running": None if now is None else sum(llm.num_running for llm in now),
        "num_waiting": None if now is None else sum(llm.num_waiting for llm in now),
        "kv_cache_usage": None if now is None else max(map(kv_cache_usage, now), default=0.0),
    }


def _model(model: Loaded, stats: LlmStats | None) -> dict[str, Any]:
    return {
        "name": model.model,
        "kind": "llm" if model.llm is not None else "vision",
        "version": model.version,
        "provider": model.provider,
        "reason": model.reason,
        "size_bytes": model.size_bytes,
        "max_num_seqs": model.llm.max_num_seqs if model.llm else None,
        "llm": _llm(model.llm, stats) if model.llm else None,
    }


def _llm(info: LlmInfo, stats: LlmStats | None) -> dict[str, Any]:
    """What was decided at its load, and how it is now (null: the engine does not say)."""
    return {
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "num_kv_tokens": info.num_kv_tokens,
        "kv_layout": info.kv_layout,
        "flash_attention": info.flash_attention,
        "num_threads": info.num_threads,
        "prefix_cache": info.prefix_cache,
        "prefix_cache_reason": info.prefix_cache_reason or None,
        "num_running": stats.num_running if stats else None,
        "num_waiting": stats.num_waiting if stats else None,
        "kv_cache_usage": kv_cache_usage(stats) if stats else None,
    }
