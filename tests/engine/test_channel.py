from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from edgerun.engine.channel import EngineChannel, ServerChannel
from edgerun.engine.messages import (
    Accepted,
    Failed,
    Infer,
    Ready,
    Start,
    Submit,
    TokenOutput,
    Tokens,
)
from edgerun.errors import ContextLengthExceeded
from edgerun.text.prompt import Prompt, SamplingParams, Segment

START = Start(
    lib_dir="", llm_provider="cpu", llm_reason="", vision_provider="", vision_reason="", num_threads=2
)
PROMPT = Prompt(
    segments=(Segment("<|im_start|>", True), Segment("héllo\0", False)),
    sampling=SamplingParams(seed=2**70 % 2**63, logit_bias={5: -1.5}),
)


def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    ours, theirs = socket.socketpair()
    engine = EngineChannel(theirs)
    big = Infer(request_id=2, model="m", data=bytes(range(256)) * 4000, shape=(10, 10), dtype="uint8")
    to_engine = [START, Submit(request_id=1, model="m", prompt=PROMPT), big]
    to_server = [
        Ready(pid=4),
        Accepted(request_id=1, num_prompt_tokens=7),
        Tokens(outputs=[TokenOutput(1, [1, 2], 0), TokenOutput(2, [], 3, "stop")]),
        Failed.of(3, ContextLengthExceeded("too long", num_prompt_tokens=9, max_model_len=4)),
    ]
    received = []

    def engine_side() -> None:
        for _ in to_engine:
            received.append(engine.receive())
        for message in to_server:
            engine.send(message)

    async def server_side() -> list[object]:
        ours.setblocking(False)
        channel = await ServerChannel.over(ours)
        for message in to_engine:
            channel.send(message)
        answers: list[object] = [await channel.receive() for _ in to_server]
        await channel.close()
        return answers

    thread = threading.Thread(target=engine_side)
    thread.start()
    answers = asyncio.run(server_side())
    thread.join()
    assert received == to_engine
    assert answers == to_server
    assert engine.receive() is None  # the server has gone
    theirs.close()


def test_an_error_keeps_kind_message_and_details_across_the_wire() -> None:
    failed = Failed.of(1, ContextLengthExceeded("too long", num_prompt_tokens=9, max_model_len=4))
    error = failed.error()
    assert isinstance(error, ContextLengthExceeded)
    assert (error.message, error.details) == ("too long", {"num_prompt_tokens": 9, "max_model_len": 4})
    assert "ZeroDivisionError: x" in Failed.of(1, ZeroDivisionError("x")).error().message


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0\0\x09abc"], ids=["length", "content", "cut off"]
)
def test_a_broken_stream_reads_as_a_lost_engine(garbage: bytes) -> None:
    async def receive() -> object:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        channel = await ServerChannel.over(ours)
        theirs.sendall(garbage)
        theirs.close()
        message = await channel.receive()
        await channel.close()
        return message

    assert asyncio.run(receive()) is None
