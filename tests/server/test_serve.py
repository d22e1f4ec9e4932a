"""The server's life, with a scripted engine: start, ready, drain, leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from edgerun.device.report import ProviderChoice
from edgerun.errors import (
    ConfigError,
    EngineLost,
    InvalidModelFile,
    PullFailed,
    ServerStartError,
)
from edgerun.server import serve
from edgerun.server.jobs import ReportProgress
from edgerun.server.serve import Parts, Server, ServeSettings, access_rules, start_message

from .fakes import LLM_SPEC, VISION_SPEC, FakeEngine, FakeRepository, device_report
from .harness import chat_body

DEFAULT_SPECS = {
    "smollm2-135m": replace(LLM_SPEC, name="smollm2-135m"),
    "efficientnet-lite0": replace(VISION_SPEC, name="efficientnet-lite0"),
}


class EndingEngine(FakeEngine):
    """As the real client: what runs when it stops ends with EngineLost."""

    async def start(self) -> None:
        self.state = "ready"
        self.stopped = asyncio.Event()

    async def stop(self) -> None:
        self.state = "stopped"
        self.crash_after_steps = 0
        if self.gate is not None:
            self.gate.set()


@dataclass
class Scene:
    """One server on a temporary socket."""

    socket: Path
    engine: FakeEngine = field(default_factory=EndingEngine)
    repository: FakeRepository = field(
        default_factory=lambda: FakeRepository(specs=dict(DEFAULT_SPECS), pulled=set(DEFAULT_SPECS))
    )
    models: tuple[str, ...] = ()
    port: int | None = None
    said: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    def server(self) -> Server:
        @contextmanager
        def progress(what: str, *, in_bytes: bool = False) -> Iterator[ReportProgress]:
            yield lambda stage, done, total: self.shown.append(f"{what}: {stage}")

        settings = ServeSettings(socket=self.socket, port=self.port, models=self.models)
        parts = Parts(device_report, self.repository, lambda device, settings: self.engine)  # type: ignore
        return Server(settings, parts, self.said.append, progress)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20)

    def run(self, visit: Callable[[Server, httpx.AsyncClient], Awaitable[None]]) -> None:
        """Serve until `visit`, which begins when the server is ready, has returned and stopped it."""

        async def scenario() -> None:
            server = self.server()
            serving = asyncio.create_task(server.serve())
            while not self.said and not serving.done():
                await asyncio.sleep(0.01)
            if not serving.done():
                async with self.client() as client:
                    await visit(server, client)
                server.stop()
            await asyncio.wait_for(serving, 20)

        asyncio.run(scenario())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "e.sock")


async def nothing(server: Server, client: httpx.AsyncClient) -> None:
    pass


def test_ready_means_that_both_default_models_answer(scene: Scene) -> None:
    async def visit(server: Server, client: httpx.AsyncClient) -> None:
        assert (await client.get("/ready")).status_code == 200
        assert set(scene.engine.loaded) == set(DEFAULT_SPECS)
        answer = await client.post(
            "/v1/chat/completions", json=chat_body(max_tokens=3) | {"model": "smollm2-135m"}
        )
        assert answer.status_code == 200

    scene.run(visit)
    assert scene.said == [f"ready unix:{scene.socket}"]
    assert scene.engine.state == "stopped"
    assert not scene.socket.exists()


def test_the_ready_line_names_the_port_that_it_got(scene: Scene) -> None:
    scene.port = 0

    async def visit(server: Server, client: httpx.AsyncClient) -> None:
        unix, url = scene.said[0].removeprefix("ready ").split()
        assert unix == f"unix:{scene.socket}"
        async with httpx.AsyncClient() as tcp:
            assert (await tcp.get(f"{url}/health")).status_code == 200

    scene.run(visit)


def test_missing_models_are_fetched_first_with_progress(scene: Scene) -> None:
    scene.repository.pulled = {"efficientnet-lite0"}
    scene.run(nothing)
    assert "smollm2-135m: download" in scene.shown
    assert "efficientnet-lite0: download" not in scene.shown
    assert scene.said


def test_named_models_alone_are_served(scene: Scene) -> None:
    scene.models = ("smollm2-135m",)

    async def visit(server: Server, client: httpx.AsyncClient) -> None:
        ids = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert ids == ["smollm2-135m"]
        assert set(scene.engine.loaded) == {"smollm2-135m"}

    scene.run(visit)


@pytest.mark.parametrize("kind", ["pull", "load", "start"])
def test_a_start_that_fails_says_why_and_leaves_nothing(scene: Scene, kind: str) -> None:
    if kind == "pull":
        scene.repository.pulled = set()
        scene.repository.pull_error = PullFailed("no network")
    elif kind == "load":
        scene.engine.error_on_load = InvalidModelFile("model.gguf is cut off")
    else:

        async def start() -> None:
            raise EngineLost("the engine process did not start")

        scene.engine.start = start  # type: ignore[method-assign]
    with pytest.raises((PullFailed, InvalidModelFile, EngineLost), match=r"no network|cut off|did not start"):
        scene.run(nothing)
    assert scene.said == []
    assert scene.engine.state == "stopped"
    assert not scene.socket.exists()


def test_health_answers_and_ready_refuses_while_models_load(scene: Scene) -> None:
    async def scenario() -> None:
        scene.engine.load_gate = asyncio.Event()
        server = scene.server()
        serving = asyncio.create_task(server.serve())
        while not scene.engine.loads:
            await asyncio.sleep(0.01)
        async with scene.client() as client:
            assert (await client.get("/health")).status_code == 200
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "loading smollm2-135m")
        assert scene.said == []
        server.stop()  # also a start under way can be stopped
        await asyncio.wait_for(serving, 20)

    asyncio.run(scenario())
    assert scene.said == []


def test_a_pull_under_way_does_not_keep_the_server_from_leaving(scene: Scene) -> None:
    scene.repository.pulled = set()
    scene.repository.pull_gate = threading.Event()

    async def scenario() -> None:
        server = scene.server()
        serving = asyncio.create_task(server.serve())
        while not scene.shown:
            await asyncio.sleep(0.01)
        server.stop()
        await asyncio.wait_for(serving, 20)
        assert scene.repository.pull_gate is not None
        scene.repository.pull_gate.set()

    asyncio.run(scenario())
    assert scene.repository.pulled == set()


def test_a_stream_that_ends_by_itself_is_let_to(scene: Scene) -> None:
    scene.engine.step_s = 0.02

    async def visit(server: Server, client: httpx.AsyncClient) -> None:
        body = chat_body(stream=True) | {"model": "smollm2-135m"}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = response.aiter_raw()
            seen = await anext(chunks)
            server.stop()
            seen += b"".join([chunk async for chunk in chunks])
        assert seen.endswith(b"data: [DONE]\n\n")

    scene.run(visit)


def test_a_second_stop_ends_streams_with_an_error_event(scene: Scene) -> None:
    scene.engine.is_endless = True
    scene.engine.step_s = 0.01

    async def visit(server: Server, client: httpx.AsyncClient) -> None:
        body = chat_body(stream=True) | {"model": "smollm2-135m"}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = response.aiter_raw()
            seen = await anext(chunks)
            server.stop()
            server.stop()
            started = time.monotonic()
            seen += b"".join([chunk async for chunk in chunks])
            assert time.monotonic() - started < serve._DRAIN_S
        assert b'data: {"error":' in seen
        assert b"[DONE]" not in seen

    scene.run(visit)


def test_nobody_is_let_in_after_stop(scene: Scene) -> None:
    async def visit(server: Server, client: httpx.AsyncClient) -> None:
        server.stop()
        while scene.socket.exists():
            await asyncio.sleep(0.01)
        with pytest.raises(httpx.ConnectError):
            async with scene.client() as late:
                await late.get("/health")

    scene.run(visit)


def test_other_addresses_need_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    base = ServeSettings(socket=tmp_path / "e.sock", host="0.0.0.0")
    with pytest.raises(ServerStartError, match="--api-key-file"):
        access_rules(base)
    rules = access_rules(replace(base, api_key_file=keys))
    assert rules.hosts is None
    assert rules.keys is not None
    assert rules.keys.accept("Bearer sesame")
    assert "127.0.0.2" in (access_rules(replace(base, host="127.0.0.2")).hosts or ())
    local = access_rules(replace(base, host="127.0.0.1"))
    assert local.keys is None
    assert local.hosts is not None
    with pytest.raises(ConfigError):
        access_rules(replace(base, api_key_file=tmp_path / "absent"))


def test_the_engine_gets_the_probes_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libllama.so"
    library.write_bytes(b"")
    monkeypatch.setenv("EDGERUN_NATIVE_DIR", str(tmp_path))
    settings = ServeSettings(socket=tmp_path / "e.sock", is_deterministic=True, has_prefix_cache=False)
    start = start_message(device_report(), settings)
    assert (start.llm_provider, start.llm_reason) == ("cpu", "it ran")
    assert start.lib_dir == str(tmp_path)
    assert start.vision_provider == "CPUExecutionProvider"
    assert start.num_threads == 2
    assert start.deterministic
    assert not start.prefix_cache
    assert start_message(device_report(), replace(settings, num_threads=5)).num_threads == 5


def test_no_provider_is_passed_on_with_its_reason(tmp_path: Path) -> None:
    device = device_report()
    nothing_works = replace(
        device, providers=tuple(replace(choice, chosen=False) for choice in device.providers)
    )
    start = start_message(nothing_works, ServeSettings(socket=tmp_path / "e.sock"))
    assert (start.llm_provider, start.lib_dir, start.vision_provider) == ("", "", "")
    assert "cuda: no NVIDIA GPU found" in start.llm_reason


def test_libraries_that_are_missing_are_a_reason_too(tmp_path: Path) -> None:
    device = device_report()
    strange = replace(device, providers=(ProviderChoice("llm", "npu", True, "it ran", is_usable=True),))
    start = start_message(strange, ServeSettings(socket=tmp_path / "e.sock"))
    assert (start.llm_provider, start.lib_dir) == ("", "")
    assert "npu libraries are not on this machine" in start.llm_reason
