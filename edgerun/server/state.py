"""What the routes share: one object per server, handed to each route by FastAPI's dependency."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from edgerun.device.report import DeviceReport
from edgerun.server.engine import Engine
from edgerun.server.metrics import ServerMetrics
from edgerun.server.models import ModelManager


@dataclass(slots=True)
class Readiness:
    """Why this server cannot answer yet, or any more; "" when it can. Written by serve.py only."""

    reason: str = "the server is starting"


@dataclass(frozen=True, slots=True)
class AppState:
    """image_pool: threads that decode and preprocess pictures."""

    engine: Engine
    models: ModelManager
    device: DeviceReport
    metrics: ServerMetrics
    readiness: Readiness
    image_pool: Executor


def _state_of(request: Request) -> AppState:
    state = request.app.state.edgerun
    assert isinstance(state, AppState)
    return state


State = Annotated[AppState, Depends(_state_of)]
