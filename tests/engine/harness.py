"""A started engine process with a tiny model, for the tests of the client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import psutil

from edgerun.engine.calls import Generation
from edgerun.engine.client import DEFAULT_STEP_TIMEOUT_S, EngineClient
from edgerun.engine.messages import Start
from edgerun.repository.spec import ModelSpec
from edgerun.text.prompt import Prompt, SamplingParams, Segment


def prompt(text: str = "hello", max_tokens: int = 10) -> Prompt:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    return Prompt(segments=(Segment(text, False),), sampling=params)


class Rig:
    def __init__(self, client: EngineClient, start: Start, spec: ModelSpec, cache: Path) -> None:
        self.client, self.start, self.spec, self.cache = client, start, spec, cache

    async def answer(self, text: str = "hello", max_tokens: int = 10) -> tuple[list[int], str | None]:
        generation = await self.client.generate("tiny", prompt(text, max_tokens))
        outputs = [output async for output in generation]
        return [t for output in outputs for t in output.token_ids], outputs[-1].finish_reason

    async def streams(self, count: int) -> list[Generation]:
        """That many long answers, each with its first token out."""
        streams = [await self.client.generate("tiny", prompt(max_tokens=450)) for _ in range(count)]
        for stream in streams:
            await anext(stream)
        return streams

    def kill_engine(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.client.pid is not None
        os.kill(self.client.pid, number)


class Run(Protocol):
    def __call__(
        self,
        body: Callable[[Rig], Awaitable[None]],
        *,
        max_num_seqs: int = 4,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> None: ...


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
