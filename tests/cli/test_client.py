from __future__ import annotations

import gc
import os
from contextlib import closing
from pathlib import Path

import pytest

from edgerun.cli.client import ApiClient, ChatOptions, connect, is_weights_file
from edgerun.config import Settings
from edgerun.errors import EdgerunError, EngineLost, InvalidRequest, ModelNotFound
from tests.cli.fake_server import FakeServer

QUESTION = [{"role": "user", "content": "hi"}]


def test_running_server_is_used(server: FakeServer) -> None:
    with connect(Settings(socket=str(server.socket)), models=["smollm2-135m"]) as client:
        assert [card.name for card in client.models()] == ["smollm2-135m", "efficientnet-lite0"]


def test_text_that_is_no_utf8_is_refused_in_words(server: FakeServer) -> None:
    question = [{"role": "user", "content": os.fsdecode(b"caf\xe9")}]
    with closing(ApiClient(server.socket)) as client, pytest.raises(InvalidRequest, match="no UTF-8"):
        list(client.chat_stream("smollm2-135m", question, ChatOptions()))


def test_nobody_on_the_socket_is_not_alive(tmp_path: Path) -> None:
    client = ApiClient(tmp_path / "absent.sock")
    assert not client.is_alive()
    client.close()


# httpcore leaves the socket of a failed connect to the garbage collector, which then warns: here, not later.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_server_that_is_gone_is_named(tmp_path: Path) -> None:
    with closing(ApiClient(tmp_path / "absent.sock")) as client:
        try:
            client.models()
        except EdgerunError as error:
            message = error.message
    gc.collect()
    assert message.startswith("no server answers on unix:")
    assert "absent.sock" in message


def test_chunks_carry_text_reason_and_usage(server: FakeServer) -> None:
    with connect(Settings(socket=str(server.socket)), models=[]) as client:
        chunks = list(client.chat_stream("smollm2-135m", QUESTION, ChatOptions()))
    assert "".join(chunk.text for chunk in chunks) == "".join(server.answer)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert [chunk.usage for chunk in chunks if chunk.usage] == [{"prompt_tokens": 7, "completion_tokens": 3}]


def test_error_event_in_the_stream_is_raised(server: FakeServer) -> None:
    server.breaks_after = 2
    heard = []
    with (
        connect(Settings(socket=str(server.socket)), models=[]) as client,
        pytest.raises(EngineLost, match="the engine died"),
    ):
        for chunk in client.chat_stream("smollm2-135m", QUESTION, ChatOptions()):
            heard.append(chunk.text)
    assert "".join(heard) == "Hello, "


def test_weights_file_goes_by_the_name_that_the_server_gave_it(server: FakeServer) -> None:
    server.models[:] = [("mine", "llm")]
    with connect(Settings(socket=str(server.socket)), models=[]) as client:
        assert client.pick_model("llm", "folder/mine.gguf", "smollm2-135m") == "mine"
        assert client.pick_model("llm", "asked", "smollm2-135m") == "asked"
        with pytest.raises(ModelNotFound, match="no vision model"):
            client.pick_model("vision", None, "efficientnet-lite0")


@pytest.mark.parametrize(
    ("model", "expected"), [("m.gguf", True), ("./m", True), ("a/m.onnx", True), ("smollm2-135m", False)]
)
def test_paths_are_told_from_names(model: str, expected: bool) -> None:
    assert is_weights_file(model) is expected
