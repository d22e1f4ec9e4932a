"""How an engine process ends: at once, and never by a crash, whatever its threads are doing."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest

from edgerun.engine.messages import FromEngine, Load, Loaded, Message, Ready, Shutdown, Start, Submit, Tokens
from edgerun.repository.spec import LlmSettings, ModelSpec
from edgerun.text.prompt import Prompt, SamplingParams

pytestmark = pytest.mark.native


class RawEngine:
    """An engine process and the bare bytes of its channel."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "edgerun.engine.main", f"--fd={theirs.fileno()}"],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,
            )
        self._reader: BinaryIO = self.socket.makefile("rb")

    def send(self, message: Message) -> None:
        data = msgspec.msgpack.encode(message)
        self.socket.sendall(struct.pack(">I", len(data)) + data)

    def wait_for(self, kind: type[Message]) -> None:
        while True:
            (length,) = struct.unpack(">I", self._reader.read(4))
            if isinstance(msgspec.msgpack.decode(self._reader.read(length), type=FromEngine), kind):
                return

    def hang_up(self) -> None:
        self._reader.close()
        self.socket.close()


@pytest.fixture
def busy(llama_lib_dir: Path, tiny_gguf: Path) -> Iterator[RawEngine]:
    """It is in the middle of answers, and more messages wait in its socket than were read."""
    engine = RawEngine()
    start = Start(
        lib_dir=str(llama_lib_dir),
        llm_provider="cpu",
        llm_reason="a test",
        vision_provider="",
        vision_reason="a test",
        num_threads=1,
    )
    engine.send(start)
    engine.wait_for(Ready)
    spec = ModelSpec("tiny", "llm", 1, str(tiny_gguf), "", 0, llm=LlmSettings(max_num_seqs=8))
    engine.send(Load(request_id=1, spec=spec))
    engine.wait_for(Loaded)
    for request_id in range(2, 10):
        prompt = Prompt(token_ids=(5,) * 30, sampling=SamplingParams(ignore_eos=True))
        engine.send(Submit(request_id=request_id, model="tiny", prompt=prompt))
    engine.wait_for(Tokens)
    yield engine
    engine.process.kill()
    engine.process.wait()
    engine.hang_up()


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (lambda engine: engine.send(Shutdown()), 0),
        (lambda engine: engine.hang_up(), 0),
        (lambda engine: engine.socket.sendall(b"\0\0\0\5hello"), 70),
        (lambda engine: engine.socket.sendall(b"\xff\xff\xff\xff"), 70),
    ],
    ids=["shutdown", "server gone", "not msgpack", "out of step"],
)
def test_a_busy_engine_ends_cleanly(busy: RawEngine, act: Callable[[RawEngine], None], status: int) -> None:
    act(busy)
    found = busy.process.wait(timeout=20)
    # A thread that sends into the closed channel may be the first to notice: that ends the process with 70.
    assert found == status or (status == 0 and found == 70 and busy.socket.fileno() < 0)
