"""How much of a step is Python: the share outside llama_decode at 1, 16 and 32 streams that only decode.

    python -m tests.benchmarks.step_profile [--model smollm2-135m] [--streams 1 16 32] [--tokens 200]
        [--context 64] [--threads N]

The engine as its process builds it, in this process; replies are encoded and sent over a socket that another
process reads. Outside is the time from the end of one llama_decode to the start of the next: sampling,
accounting, the message to the server, scheduling, filling the batch. The server process is not part of it.
For a CPU: on a GPU llama_decode returns before the work is done.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from edgerun.engine.channel import EngineChannel
from edgerun.engine.check import CheckedModels, check_model
from edgerun.engine.messages import Failed, Load, Message, Start, Submit, Tokens
from edgerun.engine.models import open_llm
from edgerun.engine.process import OPENMP_ENV
from edgerun.llm.llama_api import LlamaContext, LlamaLibrary
from edgerun.llm.loader import physical_cores
from edgerun.llm.loop import EngineLoop
from edgerun.llm.worker import LlmWorker
from edgerun.native.flavours import find
from edgerun.repository.repository import default_repository
from edgerun.repository.spec import ModelSpec
from edgerun.text.prompt import Prompt, SamplingParams

_MAX_STREAMS = 32
_REQUEST_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One llama_decode. Times of time.perf_counter."""

    began_s: float
    ended_s: float
    num_tokens: int


class DecodeClock:
    """Times every llama_decode of this process while it is entered; `calls` may be cleared between rounds."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._decode = LlamaContext.decode

    def __enter__(self) -> DecodeClock:
        decode, calls = self._decode, self.calls

        def timed(context: LlamaContext) -> int:
            began_s = time.perf_counter()
            code = decode(context)
            calls.append(Call(began_s, time.perf_counter(), int(context.batch.native.n_tokens)))
            return code

        # The engine has no seam here, and needs none but for this.
        setattr(LlamaContext, "decode", timed)  # noqa: B010
        return self

    def __exit__(self, *error: object) -> None:
        setattr(LlamaContext, "decode", self._decode)  # noqa: B010


class Replies:
    """Sends what the engine says as the engine process does, and sees when all requests have ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:  # the reader keeps its own copy, and ends when we close ours
            self._reader = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._socket, self._channel = ours, EngineChannel(ours)
        self._num_open = 0
        self._all_ended = threading.Event()

    def expect(self, num_requests: int) -> None:
        self._num_open = num_requests
        self._all_ended.clear()

    def __call__(self, message: Message) -> None:
        self._channel.send(message)
        if isinstance(message, Failed):
            sys.stderr.write(f"a request failed: {message.message}\n")
            self._num_open -= 1
        elif isinstance(message, Tokens):
            self._num_open -= sum(output.finish_reason is not None for output in message.outputs)
        if self._num_open <= 0:
            self._all_ended.set()

    def wait(self) -> None:
        if not self._all_ended.wait(_REQUEST_S):
            raise TimeoutError(f"{self._num_open} requests did not end within {_REQUEST_S:.0f} s")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.wait()


def run_streams(
    worker: LlmWorker, model: str, replies: Replies, num_streams: int, args: argparse.Namespace
) -> None:
    """num_streams requests at once, each with a prompt of its own; returns when all have ended."""
    replies.expect(num_streams)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.tokens)
    for i in range(num_streams):
        words = random.Random(f"{num_streams} {i}")
        tokens = tuple(words.randrange(1000, 20000) for _ in range(args.context))
        worker.submit(Submit(request_id=i, model=model, prompt=Prompt(token_ids=tokens, sampling=params)))
    replies.wait()


def report(calls: list[Call], num_streams: int) -> str:
    """Of neighbouring calls that both decode one token of every stream."""
    steps = [
        (after.began_s - before.ended_s, after.began_s - before.began_s)
        for before, after in itertools.pairwise(calls)
        if before.num_tokens == after.num_tokens == num_streams
    ]
    if not steps:
        return f"{num_streams:3} streams: never ran all at once; use more --tokens"
    outside_ms = statistics.median(outside for outside, _ in steps) * 1e3
    step_ms = statistics.median(step for _, step in steps) * 1e3
    shares = [outside / step for outside, step in steps]
    total = sum(outside for outside, _ in steps) / sum(step for _, step in steps)
    return (
        f"{num_streams:3} streams: step {step_ms:7.2f} ms, outside llama_decode {outside_ms:6.3f} ms, "
        f"share {statistics.median(shares):.2%} (median), {total:.2%} (all time) of {len(steps)} steps"
    )


def open_worker(spec: ModelSpec, start: Start, loop: EngineLoop, replies: Replies) -> LlmWorker:
    """As the engine process opens it, with what was measured for this model."""
    tuning = asyncio.run(check_model(spec, start, CheckedModels()))
    library = LlamaLibrary(Path(start.lib_dir))
    worker, loaded = open_llm(Load(request_id=0, spec=spec, tuning=tuning), start, library, loop, replies)
    info = loaded.llm
    assert info is not None
    flash = "on" if info.flash_attention else "off"
    sys.stdout.write(
        f"{spec.name}: {info.kv_layout}, flash attention {flash}, {info.num_threads} threads, "
        f"{info.max_num_seqs} sequences of {info.max_model_len} tokens\n"
    )
    return worker


def main() -> None:
    if any(os.environ.get(name) != value for name, value in OPENMP_ENV.items()):
        # OpenMP reads its variables when it is loaded: they must be there from the start.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **OPENMP_ENV})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="a name, or a GGUF file")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument(
        "--tokens", type=int, default=200, help="of each answer; long enough that all run at once for a while"
    )
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--threads", type=int, default=physical_cores())
    args = parser.parse_args()
    spec = default_repository().resolve(args.model)
    settings = dataclasses.replace(
        spec.llm, max_num_seqs=max(_MAX_STREAMS, *args.streams), max_model_len=args.context + args.tokens + 64
    )
    spec = dataclasses.replace(spec, llm=settings)
    start = Start(
        lib_dir=str(find("cpu", None).path),
        llm_provider="cpu",
        llm_reason="benchmark",
        vision_provider="",
        vision_reason="not used",
        num_threads=args.threads,
    )
    loop, replies = EngineLoop(lambda error: os._exit(1)), Replies()
    loop.start()
    with DecodeClock() as clock:
        worker = open_worker(spec, start, loop, replies)
        run_streams(worker, spec.name, replies, 2, args)  # warms up
        for num_streams in args.streams:
            clock.calls.clear()
            run_streams(worker, spec.name, replies, num_streams, args)
            sys.stdout.write(report(clock.calls, num_streams) + "\n")
        worker.close()
    loop.stop()
    replies.close()


if __name__ == "__main__":
    main()
