"""`edgerun serve` as a user starts it: its refusals, and its whole life with a real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from edgerun.server.local import local_server

from .harness import running


def serve(socket: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgerun", "serve", "--socket", str(socket), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a start that failed."""
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_second_server_is_told_of_the_first(tmp_path: Path) -> None:
    with running() as server:
        assert str(server.socket) in refusal(serve(server.socket, "--no-tcp"))
        line = refusal(serve(tmp_path / "e.sock", "--port", str(server.port)))
        assert "an edgerun server" in line
    assert not (tmp_path / "e.sock").exists()


def test_other_addresses_are_refused_without_keys(tmp_path: Path) -> None:
    assert "--api-key-file" in refusal(serve(tmp_path / "e.sock", "--host", "0.0.0.0"))


def test_help_shows_an_example() -> None:
    command = [sys.executable, "-m", "edgerun", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "edgerun serve --model smollm2-135m" in done.stdout
    assert "--child" not in done.stdout


# ---- with llama.cpp and a tiny model of random weights


@contextmanager
def server_of(socket: Path, models: Sequence[Path]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "edgerun", "serve", "--socket", str(socket), "--no-tcp"]
    for model in models:
        command += ["--model", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"ready unix:{socket}\n"
            yield process
        finally:
            process.kill()


def client_of(socket: Path) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://localhost", timeout=60
    )


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, **fields}


@pytest.mark.native
@pytest.mark.usefixtures("llama_lib_dir")
def test_a_server_for_one_command_answers_and_is_gone_afterwards(tiny_gguf: Path) -> None:
    with local_server(models=[str(tiny_gguf)]) as socket, client_of(socket) as client:
        answer = client.post("/v1/chat/completions", json=body(max_tokens=5)).json()
        assert answer["usage"]["completion_tokens"] == 5
        pid = client.get("/v1/device").json()["engine"]["pid"]
    assert not socket.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.native
@pytest.mark.usefixtures("llama_lib_dir")
def test_a_killed_engine_costs_one_stream_and_nothing_else(tiny_gguf: Path, tmp_path: Path) -> None:
    socket = tmp_path / "e.sock"
    with server_of(socket, [tiny_gguf]), client_of(socket) as client, client_of(socket) as other:
        for _ in range(10):  # the tiny model may be done before the signal arrives
            pid = other.get("/v1/device").json()["engine"]["pid"]
            with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as response:
                chunks = response.iter_raw()
                seen = next(chunks)
                os.kill(pid, signal.SIGKILL)
                seen += b"".join(chunks)
            assert other.get("/health").status_code == 200
            started = time.monotonic()
            assert client.post("/v1/chat/completions", json=body(max_tokens=3)).status_code == 200
            assert time.monotonic() - started < 10  # the bound that users are promised
            if b"[DONE]" not in seen:
                break
        last = json.loads(seen.split(b"data: ")[-1])
        assert last["error"]["code"] == "engine_lost"
        assert other.get("/v1/device").json()["engine"]["pid"] != pid


@pytest.mark.native
@pytest.mark.usefixtures("llama_lib_dir")
def test_sigterm_twice_ends_a_stream_and_exits_0(tiny_gguf: Path, tmp_path: Path) -> None:
    socket = tmp_path / "e.sock"
    with server_of(socket, [tiny_gguf]) as process, client_of(socket) as client:
        with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as response:
            chunks = response.iter_raw()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            list(chunks)
        assert process.wait(10) == 0
    assert not socket.exists()
