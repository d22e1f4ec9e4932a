from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from edgerun.cli import demo
from edgerun.cli.client import ApiClient
from tests.cli.fake_server import FakeServer


@pytest.fixture
def client(server: FakeServer) -> Iterator[ApiClient]:
    client = ApiClient(server.socket)
    yield client
    client.close()


def test_answer_comes_with_times_and_provider(client: ApiClient, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show_answer(client, "smollm2-135m")
    shown = capsys.readouterr().out
    assert "Hello, wörld" in shown
    assert re.search(r"first token after \d+ ms, then \d+\.\d tokens/s \(3 tokens, llm-provider\)", shown)


def test_label_comes_with_time_and_provider(client: ApiClient, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show_label(client, "efficientnet-lite0", demo.sample_photo())
    shown = capsys.readouterr().out
    assert "coffee.jpg\ncup (90%)" in shown
    assert re.search(r"\d+ ms from file to label \(FakeProvider\)", shown)
