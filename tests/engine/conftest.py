"""The engine process that the tests of the client share the way to start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from edgerun.engine.check import CheckedModels
from edgerun.engine.client import DEFAULT_STEP_TIMEOUT_S, EngineClient
from edgerun.engine.messages import Start
from edgerun.repository.spec import LlmSettings, ModelSpec

from .harness import Rig, Run


@pytest.fixture
def run(llama_lib_dir: Path, tiny_gguf: Path, tmp_path: Path) -> Run:
    """Run a coroutine with a started engine that has the tiny model loaded."""
    start = Start(
        lib_dir=str(llama_lib_dir),
        llm_provider="cpu",
        llm_reason="a test",
        vision_provider="CPUExecutionProvider",
        vision_reason="a test",
        num_threads=1,
    )
    tiny = ModelSpec("tiny", "llm", 1, str(tiny_gguf), "", 0)

    @asynccontextmanager
    async def rig(max_num_seqs: int, step_timeout_s: float) -> AsyncIterator[Rig]:
        cache = tmp_path / "checked.json"
        settings = LlmSettings(max_num_seqs=max_num_seqs, num_kv_tokens=512 * max_num_seqs)
        spec = replace(tiny, llm=settings)
        client = EngineClient(start, checked=CheckedModels(cache), step_timeout_s=step_timeout_s)
        await client.start()
        try:
            await client.load(spec)
            yield Rig(client, start, spec, cache)
        finally:
            await client.stop()

    def run_with_rig(
        body: Callable[[Rig], Awaitable[None]],
        *,
        max_num_seqs: int = 4,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> None:
        async def main() -> None:
            async with rig(max_num_seqs, step_timeout_s) as it:
                await asyncio.wait_for(body(it), 60)

        asyncio.run(main())

    return run_with_rig
