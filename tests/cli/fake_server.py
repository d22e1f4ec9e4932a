"""A small server with a scripted answer on a Unix socket, in a thread of the test."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_START_TIMEOUT_S = 20.0


@dataclass
class FakeServer:
    """What it answers, and what it was asked. A picture is bad when its bytes are b"bad"."""

    socket: Path
    answer: list[str] = field(default_factory=lambda: ["Hello", ", ", "wörld\u2028!"])
    refusal: str | None = None  # answer every chat with this 400
    breaks_after: int | None = None  # chunks before an error event
    models: list[tuple[str, str]] = field(
        default_factory=lambda: [("smollm2-135m", "llm"), ("efficientnet-lite0", "vision")]
    )
    chats: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/images/classify", self._classify, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        cards = [
            {"id": name, "kind": kind, "loaded": True, "pulled": True, "provider": f"{kind}-provider"}
            for name, kind in self.models
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _chat(self, request: Request) -> Response:
        self.chats.append(await request.json())
        if self.refusal is not None:
            return JSONResponse({"error": {"message": self.refusal, "type": "invalid_request_error"}}, 400)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        def event(body: object) -> bytes:
            return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"

        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for index, text in enumerate(self.answer):
            if index == self.breaks_after:
                yield event({"error": {"message": "the engine died", "type": "server_error"}})
                return
            yield event({"choices": [{"delta": {"content": text}, "finish_reason": None}]})
            await asyncio.sleep(0)
        yield event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": len(self.answer)}
        yield event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    async def _classify(self, request: Request) -> Response:
        form = await request.form()
        file = form["file"]
        assert isinstance(file, UploadFile)
        content = await file.read()
        self.pictures.append({"name": file.filename, "model": form["model"], "top_k": form["top_k"]})
        await form.close()
        if content == b"bad":
            return JSONResponse({"error": {"message": "these bytes are no picture"}}, 400)
        predictions = [
            {"label": "cup", "index": 3, "score": 0.9},
            {"label": "mug", "index": 4, "score": 0.05},
        ]
        timing = {"preprocess": 1.0, "queue": 0.5, "infer": 2.0, "total": 4.0}
        row = {"index": 0, "predictions": predictions, "timing_ms": timing}
        body = {"model": form["model"], "version": 1, "provider": "FakeProvider", "data": [row]}
        return JSONResponse(body)


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    config = uvicorn.Config(
        server.app(), uds=str(server.socket), log_config=None, lifespan="off", ws="none", http="h11"
    )
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run)
    thread.start()
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not uvicorn_server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the fake server did not start"
            time.sleep(0.01)
        yield server
    finally:
        uvicorn_server.should_exit = True
        thread.join()
