from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgerun.cli.chat import converse
from edgerun.cli.client import ApiClient, ChatChunk, ChatOptions, Message
from tests.cli.conftest import Run
from tests.cli.fake_server import FakeServer

ANSWER = "Hello, wörld\u2028!"


class Person:
    """Somebody at the keyboard: lines, and what Ctrl-C raises; Ctrl-D at the end."""

    def __init__(self, *acts: str | type[BaseException]) -> None:
        self._acts = iter((*acts, EOFError))

    def __call__(self, prompt: str) -> str:
        act = next(self._acts)
        if isinstance(act, str):
            return act
        raise act


def talk(server: FakeServer, *acts: str | type[BaseException], system: str = "") -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    client = ApiClient(server.socket)
    try:
        converse(client, "smollm2-135m", messages, ChatOptions(), read_line=Person(*acts))
    finally:
        client.close()
    return messages


def test_answer_goes_to_stdout_alone(ask: Run) -> None:
    result = ask("chat", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{ANSWER}\n", "")


def test_options_reach_the_server(ask: Run, server: FakeServer) -> None:
    ask("chat", "hi", "-m", "mine", "-s", "brief", "--max-tokens", "3", "--temperature", "0", "--seed", "5")
    asked = server.chats[0]
    assert asked["model"] == "mine"
    assert asked["messages"] == [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "hi"},
    ]
    assert (asked["max_tokens"], asked["temperature"], asked["seed"]) == (3, 0, 5)


def test_options_that_were_not_given_are_left_to_the_server(ask: Run, server: FakeServer) -> None:
    ask("chat", "hi")
    assert not {"max_tokens", "temperature", "seed"} & server.chats[0].keys()


def test_piped_text_comes_after_the_prompt(ask: Run, server: FakeServer) -> None:
    ask("chat", "sum up", stdin="a long text\n")
    ask("chat", stdin="only this")
    assert [chat["messages"][0]["content"] for chat in server.chats] == ["sum up\n\na long text", "only this"]


def test_nothing_to_ask_is_a_usage_error(ask: Run, server: FakeServer) -> None:
    assert ask("chat").exit_code == 2
    assert server.chats == []


@pytest.mark.parametrize("args", [["--temperature", "3"], ["--max-tokens", "0"], ["--seed", "x"]])
def test_values_out_of_range_are_usage_errors(ask: Run, args: list[str]) -> None:
    assert ask("chat", "hi", *args).exit_code == 2


def test_json_is_one_document(ask: Run) -> None:
    result = ask("chat", "hi", "--json")
    answer = json.loads(result.stdout)
    assert answer["content"] == ANSWER
    assert answer["model"] == "smollm2-135m"
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3}
    assert set(answer["timing_ms"]) == {"ttft", "total"}


def test_without_a_name_a_language_model_of_the_server_answers(ask: Run, server: FakeServer) -> None:
    server.models[:] = [("other-vision", "vision"), ("other-llm", "llm")]
    assert ask("chat", "hi").exit_code == 0
    assert server.chats[0]["model"] == "other-llm"


def test_refusal_shows_the_words_of_the_server(ask: Run, server: FakeServer) -> None:
    server.refusal = "roles have to take turns"
    result = ask("chat", "hi")
    assert (result.exit_code, result.stderr) == (1, "error: roles have to take turns\n")


def test_answer_that_breaks_off_fails_and_keeps_what_came(ask: Run, server: FakeServer) -> None:
    server.breaks_after = 1
    result = ask("chat", "hi")
    assert (result.exit_code, result.stdout) == (1, "Hello\n")
    assert result.stderr == "error: the engine died\n"


def test_picture_is_told_in_words_and_said_so(ask: Run, server: FakeServer, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"good")
    result = ask("chat", "what is it?", "--image", str(photo))
    [message] = server.chats[0]["messages"]
    assert "cup (90%), mug (5%)" in message["content"]
    assert message["content"].endswith("\n\nwhat is it?")
    assert "reads text only" in result.stderr
    assert result.stdout == f"{ANSWER}\n"


def test_bad_picture_fails_before_the_question(ask: Run, server: FakeServer, tmp_path: Path) -> None:
    result = ask("chat", "what?", "--image", str(tmp_path / "absent.jpg"))
    assert result.exit_code == 1
    assert "absent.jpg" in result.stderr
    assert server.chats == []


def test_conversation_sends_what_was_said_before(server: FakeServer) -> None:
    messages = talk(server, "one", "", "two", system="brief")
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in server.chats[1]["messages"]] == ["brief", "one", ANSWER, "two"]


def test_ctrl_c_at_the_prompt_keeps_the_conversation(server: FakeServer) -> None:
    assert len(talk(server, KeyboardInterrupt, "one")) == 2


def test_question_that_failed_is_forgotten(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusal = "no"
    assert talk(server, "one") == []
    assert "error: no\n" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_what_was_heard() -> None:
    class Interrupted:
        closed = 0

        def chat_stream(
            self, model: str, messages: list[Message], options: ChatOptions
        ) -> Iterator[ChatChunk]:
            try:
                yield ChatChunk(text="half an ")
                raise KeyboardInterrupt
            finally:
                self.closed += 1

    client, messages = Interrupted(), []
    converse(client, "m", messages, ChatOptions(), read_line=Person("one", "two"))  # type: ignore[arg-type]
    assert [message["content"] for message in messages] == ["one", "half an ", "two", "half an "]
    assert client.closed == 2
