"""Names to loaded models: once, lazily, and again after a crash."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from edgerun.device.report import ProviderChoice
from edgerun.errors import (
    InvalidModelFile,
    InvalidRequest,
    ModelNotFound,
    ModelNotPulled,
    ProviderUnavailable,
    PullFailed,
)
from edgerun.server.models import ModelManager

from .fakes import LLM_SPEC, VISION_SPEC, FakeEngine, FakeRepository, device_report, loaded_of


def manager_of(engine: FakeEngine, repository: FakeRepository | None = None) -> ModelManager:
    return ModelManager(repository or FakeRepository(), engine, device_report())  # type: ignore[arg-type]


def test_requests_at_once_load_a_model_once() -> None:
    async def scenario() -> int:
        engine = FakeEngine(load_gate=asyncio.Event())
        manager = manager_of(engine)
        waiting = [asyncio.create_task(manager.llm("parrot")) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert engine.load_gate is not None
        engine.load_gate.set()
        assert len({id(ready) for ready in await asyncio.gather(*waiting)}) == 1
        await manager.llm("parrot")
        return len(engine.loads)

    assert asyncio.run(scenario()) == 1


def test_a_failed_load_is_tried_again_by_the_next_request() -> None:
    async def scenario() -> None:
        engine = FakeEngine(error_on_load=InvalidModelFile("cut off"))
        manager = manager_of(engine)
        with pytest.raises(InvalidModelFile):
            await manager.llm("parrot")
        engine.error_on_load = None
        assert (await manager.llm("parrot")).spec is LLM_SPEC

    asyncio.run(scenario())


def test_a_model_that_the_engine_loaded_again_is_not_loaded_twice() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        manager = manager_of(engine)
        before = await manager.llm("parrot")
        engine.loaded = {}
        engine.state = "restarting"
        assert await manager.llm("parrot") is before  # the engine keeps such a request until it is back
        engine.state = "ready"
        engine.loaded = {"parrot": loaded_of(LLM_SPEC)}
        assert (await manager.llm("parrot")).loaded is engine.loaded["parrot"]
        assert len(engine.loads) == 1

    asyncio.run(scenario())


def test_what_was_unloaded_is_loaded_by_the_next_request() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        manager = manager_of(engine)
        await manager.llm("parrot")
        await (await manager.start_unload("parrot")).result()
        assert not engine.loaded
        await manager.llm("parrot")
        assert len(engine.loads) == 2

    asyncio.run(scenario())


def test_gpu_only_models_are_refused_without_one() -> None:
    repository = FakeRepository(specs={"parrot": replace(LLM_SPEC, require="gpu")})
    engine = FakeEngine()
    with pytest.raises(ProviderUnavailable, match="no NVIDIA GPU found"):
        asyncio.run(manager_of(engine, repository).llm("parrot"))
    assert engine.loads == []


def test_what_is_not_pulled_says_what_to_do() -> None:
    repository = FakeRepository(pulled={"rgb"})
    with pytest.raises(ModelNotPulled, match="models pull parrot"):
        asyncio.run(manager_of(FakeEngine(), repository).llm("parrot"))


def test_kinds_are_not_mixed_up() -> None:
    manager = manager_of(FakeEngine())
    with pytest.raises(InvalidRequest, match="vision model"):
        asyncio.run(manager.llm("rgb"))
    with pytest.raises(InvalidRequest, match="language model"):
        asyncio.run(manager.vision("parrot"))


@pytest.mark.parametrize("name", ["", "/etc/passwd", "a/b.gguf", "..", ".hidden", "a\\b", "x" * 300, "a\0b"])
def test_a_name_from_a_request_is_never_a_path(name: str) -> None:
    repository = FakeRepository()
    manager = manager_of(FakeEngine(), repository)
    for ask in (manager.llm, manager.card, manager.start_load, manager.start_pull):
        with pytest.raises(ModelNotFound):
            asyncio.run(ask(name))
    assert repository.resolved == []


def test_serve_only_answers_for_nothing_else() -> None:
    async def scenario() -> None:
        manager = manager_of(FakeEngine())
        manager.serve_only([LLM_SPEC])
        assert [card.name for card in await manager.cards()] == ["parrot"]
        assert (await manager.llm("parrot")).spec is LLM_SPEC
        with pytest.raises(ModelNotFound, match="there is: parrot"):
            await manager.vision("rgb")
        with pytest.raises(InvalidRequest, match="no vision model"):
            await manager.default_name("vision")

    asyncio.run(scenario())


def test_the_default_is_a_loaded_model_first() -> None:
    async def scenario() -> None:
        other = replace(VISION_SPEC, name="aaa")
        repository = FakeRepository(specs={"aaa": other, "rgb": VISION_SPEC}, pulled={"aaa", "rgb"})
        manager = manager_of(FakeEngine(), repository)
        assert await manager.default_name("vision") == "aaa"
        await manager.vision("rgb")
        assert await manager.default_name("vision") == "rgb"

    asyncio.run(scenario())


def test_cards_tell_what_is_loaded() -> None:
    async def scenario() -> None:
        manager = manager_of(FakeEngine())
        card = await manager.card("parrot")
        assert (card.is_loaded, card.provider, card.max_model_len) == (False, None, None)
        await manager.llm("parrot")
        card = await manager.card("parrot")
        assert (card.is_loaded, card.provider, card.max_model_len) == (True, "cpu", 4096)

    asyncio.run(scenario())


def test_rollback_loads_the_version_before_where_one_is_loaded() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        manager = manager_of(engine)
        await manager.vision("rgb")
        await (await manager.start_rollback("rgb")).result()
        assert [spec.version for spec in engine.loads] == [3, 2]
        assert (await manager.vision("rgb")).loaded.version == 2

    asyncio.run(scenario())


def test_closing_stops_a_pull_at_its_next_report() -> None:
    repository = FakeRepository(pulled=set())
    manager = manager_of(FakeEngine(), repository)
    manager.close()
    with pytest.raises(PullFailed, match="stopping"):
        asyncio.run(manager.fetch("parrot", lambda stage, done, total: None))


def test_fetch_pulls_only_what_is_missing() -> None:
    async def scenario() -> list[str]:
        repository = FakeRepository(pulled={"rgb"})
        manager, heard = manager_of(FakeEngine(), repository), []
        for name in ("rgb", "parrot"):
            await manager.fetch(name, lambda stage, done, total, name=name: heard.append(name))  # type: ignore[misc]
        return heard

    assert set(asyncio.run(scenario())) == {"parrot"}


def test_nothing_is_downloaded_for_a_device_that_cannot_run_it() -> None:
    repository = FakeRepository(pulled=set())
    device = replace(device_report(), providers=(ProviderChoice("llm", "cpu", False, "not built"),))
    manager = ModelManager(repository, FakeEngine(), device)  # type: ignore[arg-type]
    with pytest.raises(ProviderUnavailable, match="not built"):
        asyncio.run(manager.fetch("parrot", lambda stage, done, total: None))
    assert repository.pulled == set()
