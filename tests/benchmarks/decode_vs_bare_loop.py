"""One stream through the engine process against a bare loop over llama_decode: same file, threads, run.

    python -m tests.benchmarks.decode_vs_bare_loop [--model smollm2-135m] [--tokens 200] [--rounds 7]

The two sides alternate (A B A B ...), so that a drift of the machine hits both; the figure is the median of
the ratios, round by round. The engine side counts from the first token to the last as a client of the engine
sees them, so it includes scheduling, sampling, the message to the server process and its event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from edgerun.engine.client import EngineClient
from edgerun.engine.messages import LlmInfo, Start
from edgerun.engine.process import OPENMP_ENV
from edgerun.llm.llama_api import ContextSettings, LlamaContext, LlamaLibrary, LlamaModel
from edgerun.llm.loader import physical_cores
from edgerun.native.flavours import find
from edgerun.repository.repository import default_repository
from edgerun.repository.spec import ModelSpec
from edgerun.text.prompt import Prompt, SamplingParams, Segment

PROMPT = "The river flows through the valley and "


class BareLoop:
    """Greedy decoding with nothing around llama_decode but an argmax."""

    def __init__(self, lib_dir: Path, spec: ModelSpec, info: LlmInfo) -> None:
        """info: what the engine runs with; the same layout, kernels and threads are taken here."""
        self._model = LlamaModel(LlamaLibrary(lib_dir), spec.path, use_gpu=False)
        settings = ContextSettings(
            num_kv_tokens=info.num_kv_tokens,
            max_batch_tokens=512,
            num_seq_ids=info.max_num_seqs,
            num_threads=info.num_threads,
            unified=info.kv_layout == "unified",
            flash_attention=info.flash_attention,
        )
        self._context = LlamaContext(self._model, settings)

    def tokens_per_s(self, num_tokens: int) -> float:
        context, batch = self._context, self._context.batch
        prompt = self._model.tokenize(PROMPT, special=False)
        batch.clear()
        last = batch.add(0, prompt, 0, wants_logits=True)
        context.decode()
        token = int(np.argmax(context.logits(last)))
        started = time.perf_counter()
        for i in range(num_tokens - 1):
            batch.clear()
            batch.add(0, [token], len(prompt) + i, wants_logits=True)
            context.decode()
            token = int(np.argmax(context.logits(0)))
        rate = (num_tokens - 1) / (time.perf_counter() - started)
        context.remove_sequence(0)
        return rate


async def engine_tokens_per_s(client: EngineClient, name: str, num_tokens: int) -> float:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
    prompt = Prompt(segments=(Segment(PROMPT, False),), sampling=params)
    generation = await client.generate(name, prompt)
    first, count = 0.0, 0
    async for output in generation:
        first = first or time.perf_counter()
        count += len(output.token_ids)
    return (count - 1) / (time.perf_counter() - first)


async def compare(args: argparse.Namespace) -> list[tuple[float, float]]:
    spec = default_repository().resolve(args.model)
    lib_dir, threads = find("cpu", None).path, args.threads or physical_cores()
    start = Start(
        lib_dir=str(lib_dir),
        llm_provider="cpu",
        llm_reason="benchmark",
        vision_provider="",
        vision_reason="not used",
        num_threads=threads,
    )
    client = EngineClient(start)
    await client.start()
    try:
        loaded = await client.load(spec)
        assert loaded.llm is not None
        bare = BareLoop(lib_dir, spec, loaded.llm)
        rounds = []
        for number in range(args.rounds + 1):
            pair = (
                await engine_tokens_per_s(client, spec.name, args.tokens),
                bare.tokens_per_s(args.tokens),
            )
            if number:  # the first round warms both up
                rounds.append(pair)
        return rounds
    finally:
        await client.stop()


def main() -> None:
    if any(os.environ.get(name) != value for name, value in OPENMP_ENV.items()):
        # OpenMP reads its variables when it is loaded: both sides must have the same ones from the start.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **OPENMP_ENV})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="default: the physical cores")
    rounds = asyncio.run(compare(parser.parse_args()))
    for engine, bare in rounds:
        sys.stdout.write(
            f"engine {engine:6.1f} tokens/s   bare loop {bare:6.1f}   ratio {engine / bare:.3f}\n"
        )
    ratios = [engine / bare for engine, bare in rounds]
    engine_median, bare_median = (statistics.median(side) for side in zip(*rounds, strict=True))
    sys.stdout.write(
        f"median {engine_median:.1f} against {bare_median:.1f} tokens/s; ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds)\n"
    )


if __name__ == "__main__":
    main()
