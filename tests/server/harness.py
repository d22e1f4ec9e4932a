"""The real HTTP application over the fakes, on real sockets, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from edgerun.server.app import create_app
from edgerun.server.clients import PeerProtocol
from edgerun.server.metrics import ServerMetrics
from edgerun.server.middleware import AccessRules
from edgerun.server.models import ModelManager
from edgerun.server.socket import bind_tcp, bind_unix
from edgerun.server.state import AppState, Readiness

from .fakes import FakeEngine, FakeRepository, device_report


@dataclass
class Running:
    """The application on a Unix socket and a TCP port. Only `on_loop` may touch asyncio objects."""

    state: AppState
    engine: FakeEngine
    repository: FakeRepository
    socket: Path
    port: int
    client: httpx.Client
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on_loop(self, call: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(call)

    def chat(self, content: object = "Name trees.", **fields: object) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=chat_body(content, **fields))


def chat_body(content: object = "Name trees.", **fields: object) -> dict[str, object]:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return {"model": "parrot", "messages": messages, **fields}


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def running(
    engine: FakeEngine | None = None,
    repository: FakeRepository | None = None,
    rules: AccessRules | None = None,
    readiness: str = "",
) -> Iterator[Running]:
    """The real application over real sockets, in a thread."""
    engine, repository = engine or FakeEngine(), repository or FakeRepository()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as image_pool:
        socket = Path(folder) / "e.sock"
        unix, tcp = bind_unix(socket), bind_tcp("127.0.0.1", 0)
        port = tcp.getsockname()[1]
        device = device_report()
        manager = ModelManager(repository, engine, device)  # type: ignore[arg-type]
        state = AppState(engine, manager, device, ServerMetrics(), Readiness(readiness), image_pool)
        app = create_app(state, rules)
        config = uvicorn.Config(app, http=PeerProtocol, ws="none", lifespan="off", log_config=None)
        server = _Http(config)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([unix, tcp]),))
        thread.start()
        transport = httpx.HTTPTransport(uds=str(socket))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=20) as client:
            try:
                yield Running(state, engine, repository, socket, port, client, loop)
            finally:
                server.should_exit = server.force_exit = True
                thread.join(20)
                loop.close()


def events_of(response: httpx.Response) -> list[str]:
    """The data of each server-sent event."""
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [block[len("data: ") :] for block in blocks[:-1]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, str | None]:
    """The error object of an answer, checked for its shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return error
