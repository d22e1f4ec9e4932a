"""The whole way over the process boundary, with a real engine process and a tiny model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from edgerun.engine.messages import Progress
from edgerun.errors import ContextLengthExceeded, ModelLoadFailed, ModelNotFound, ProviderUnavailable
from edgerun.repository.spec import ModelSpec

from .harness import Rig, Run, children, prompt, until

pytestmark = pytest.mark.native


def test_many_at_once_each_get_their_own_answer(run: Run) -> None:
    async def body(rig: Rig) -> None:
        texts = [f"text {i}" * (1 + i % 5) for i in range(12)]
        alone = [await rig.answer(text) for text in texts]
        together = await asyncio.gather(*map(rig.answer, texts))
        assert [(len(tokens), reason) for tokens, reason in together] == [(10, "length")] * 12
        # In a batch the kernels differ a little, and a random model has near ties: one or two may turn
        # elsewhere (tests/llm checks each token's rank); answers handed to the wrong request all differ.
        same_start = sum(a[0][:2] == b[0][:2] for a, b in zip(alone, together, strict=True))
        assert same_start >= 9
        assert len({tuple(tokens[:2]) for tokens, _ in alone}) > 4

    run(body)


def test_cancel_frees_the_work_and_others_go_on(run: Run) -> None:
    async def body(rig: Rig) -> None:
        generation = await rig.client.generate("tiny", prompt(max_tokens=450))
        await anext(generation)
        generation.cancel()
        generation.cancel()
        rest = [output async for output in generation]
        assert rest[-1].finish_reason == "abort"
        stats = (await rig.client.stats()).llm["tiny"]
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
        assert (await rig.answer())[1] == "length"

    run(body)


def test_errors_of_the_engine_keep_their_type(run: Run) -> None:
    async def body(rig: Rig) -> None:
        with pytest.raises(ContextLengthExceeded) as too_long:
            await rig.client.generate("tiny", prompt("a" * 600))
        assert too_long.value.details["max_model_len"] == 512
        with pytest.raises(ModelNotFound):
            await rig.client.generate("other", prompt())
        assert len(await rig.client.tokenize("tiny", prompt("abc"))) == 4

    run(body)


def test_a_bad_file_costs_an_error_and_nothing_else(run: Run, tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        bad = tmp_path / "bad.gguf"
        whole = Path(rig.spec.path).read_bytes()
        bad.write_bytes(whole[: len(whole) // 2])
        spec = ModelSpec("bad", "llm", 1, str(bad), "", 0)
        pid = rig.client.pid
        with pytest.raises(ModelLoadFailed, match=r"bad\.gguf"):
            await rig.client.load(spec)
        assert rig.client.pid == pid
        assert list(rig.client.loaded) == ["tiny"]
        assert (await rig.answer())[1] == "length"

    run(body)


def test_a_model_that_passed_is_not_checked_again(run: Run) -> None:
    async def body(rig: Rig) -> None:
        # With nothing left to measure: what was measured on a busy machine is measured again.
        fixed = replace(rig.spec.llm, kv_layout="unified", flash_attention="on", num_threads=1)
        spec = replace(rig.spec, llm=fixed)
        await rig.client.load(spec)
        before = rig.cache.stat().st_mtime_ns
        stages: list[str] = []
        await rig.client.load(spec, lambda progress: stages.append(progress.stage))
        assert rig.cache.stat().st_mtime_ns == before
        assert stages[0] == "check"
        assert "load" in stages

    run(body)


def test_a_model_that_requires_a_gpu_is_refused_with_the_reason(run: Run) -> None:
    async def body(rig: Rig) -> None:
        spec = ModelSpec("needy", "llm", 1, rig.spec.path, "", 0, require="gpu")
        with pytest.raises(ProviderUnavailable, match=r'require = "gpu".*a test'):
            await rig.client.load(spec)

    run(body)


def test_unload_forgets_the_model_and_reload_brings_it_back(run: Run) -> None:
    async def body(rig: Rig) -> None:
        progress: list[Progress] = []
        await rig.client.unload("tiny")
        assert rig.client.loaded == {}
        with pytest.raises(ModelNotFound):
            await rig.answer()
        await rig.client.load(rig.spec, progress.append)
        assert (await rig.answer())[1] == "length"
        with pytest.raises(ModelNotFound):
            await rig.client.unload("other")

    run(body)


def test_a_progress_callback_that_fails_costs_nobody_an_answer(run: Run) -> None:
    async def body(rig: Rig) -> None:
        def fail(progress: Progress) -> None:
            if progress.stage == "load":
                raise RuntimeError("the listener is broken")

        await rig.client.load(rig.spec, fail)
        assert (await rig.answer())[1] == "length"

    run(body)


def test_a_file_that_is_gone_is_a_failed_load(run: Run, tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        with pytest.raises(ModelLoadFailed, match="cannot be read"):
            await rig.client.load(replace(rig.spec, path=str(tmp_path / "gone.gguf")))

    run(body)


def test_a_cancelled_load_ends_its_child(run: Run, tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        new = tmp_path / "new.gguf"
        new.write_bytes(Path(rig.spec.path).read_bytes())
        load = asyncio.create_task(rig.client.load(replace(rig.spec, path=str(new))))
        await until(lambda: len(children()) == 2)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert [child.pid for child in children()] == [rig.client.pid]

    run(body)
