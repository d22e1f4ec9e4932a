"""`edgerun chat`: one answer to stdout, or a conversation line by line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgerun.cli.client import ApiClient, ChatChunk, ChatOptions, Message, connect
from edgerun.cli.output import note, print_json
from edgerun.config import load_settings
from edgerun.errors import EdgerunError, InvalidRequest

DEFAULT_LLM = "smollm2-135m"
DEFAULT_VISION = "efficientnet-lite0"
_NUM_LABELS = 3  # of a picture, for a model that reads text only


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer. ttft_ms: until the first text was there."""

    text: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_tokens: int
    ttft_ms: float
    total_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Of the decoding: the first token belongs to the prompt's time."""
        decode_ms = self.total_ms - self.ttft_ms
        return (self.num_tokens - 1) / decode_ms * 1000 if self.num_tokens > 1 and decode_ms > 0 else 0.0


@click.command()
@click.argument("prompt", required=False)
@click.option("-m", "--model", metavar="NAME", help=f"Language model (default: {DEFAULT_LLM}).")
@click.option("-s", "--system", metavar="TEXT", help="System message.")
@click.option(
    "--image", type=click.Path(path_type=Path), help="A picture; the model is told what a classifier sees."
)
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="At most N tokens of answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), metavar="T", help="0 is greedy, 2 is wild.")
@click.option("--seed", type=int, metavar="N", help="The same seed gives the same answer.")
@click.option("--no-server", is_flag=True, help="Load the model for this call, even if a server runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, when the answer is whole.")
def chat(
    prompt: str | None,
    model: str | None,
    system: str | None,
    image: Path | None,
    no_server: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Ask a language model; the answer streams to stdout.

    Piped text comes after PROMPT. Without PROMPT on a terminal: a conversation, in which Ctrl-C stops the
    answer and Ctrl-D leaves.

    \b
    Example:
      edgerun chat "Give me three names for a cat"
      git diff | edgerun chat "What changed here?" --temperature 0
    """
    question = _question(prompt, "What does the picture show?" if image else None)
    if question is None and as_json:
        raise click.UsageError("--json needs a PROMPT or piped text")
    settings = load_settings().settings
    wanted = [model or DEFAULT_LLM, *([DEFAULT_VISION] if image else [])]
    with connect(settings, models=wanted, no_server=no_server) as client:
        name = client.pick_model("llm", model, DEFAULT_LLM)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        options = ChatOptions(**sampling)
        if image:
            # Not a message of its own: strict templates want the turns to alternate.
            question = f"{describe(client, image, name)}\n\n{question}"
        if question is None:
            converse(client, name, messages, options)
            return
        messages.append({"role": "user", "content": question})
        answer = stream(client.chat_stream(name, messages, options), show=not as_json)
    if as_json:
        print_json(_to_json(name, answer))


def stream(chunks: Iterator[ChatChunk], *, show: bool) -> Answer:
    """Take a whole answer, writing it to stdout as it comes if `show`."""
    start = time.perf_counter()
    first: float | None = None
    text: list[str] = []
    finish_reason = None
    usage: dict[str, Any] = {}
    try:
        for chunk in chunks:
            if chunk.text:
                first = first or time.perf_counter()
                text.append(chunk.text)
                if show:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
            finish_reason = chunk.finish_reason or finish_reason
            usage = dict(chunk.usage or usage)
    finally:
        if show and text and not text[-1].endswith("\n"):
            click.echo()
    end = time.perf_counter()
    return Answer(
        text="".join(text),
        finish_reason=finish_reason,
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_tokens=usage.get("completion_tokens", 0),
        ttft_ms=((first or end) - start) * 1000,
        total_ms=(end - start) * 1000,
    )


def describe(client: ApiClient, image: Path, model: str) -> str:
    """The picture in words, for a model that reads text only; says so on stderr."""
    vision = client.pick_model("vision", None, DEFAULT_VISION)
    found = client.classify(image, model=vision, top_k=_NUM_LABELS)
    labels = ", ".join(f"{row['label']} ({row['score']:.0%})" for row in found.predictions)
    note(f"note: {model} reads text only; it is told what {vision} sees in {image.name}: {labels}")
    return f"An image classifier says that the picture shows: {labels}."


def converse(
    client: ApiClient,
    model: str,
    messages: list[Message],
    options: ChatOptions,
    read_line: Callable[[str], str] = input,
) -> None:
    """Ask and answer until Ctrl-D. read_line raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
    _enable_line_editing()
    note(f"{model}: Enter sends, Ctrl-C stops the answer, Ctrl-D leaves.")
    while True:
        try:
            line = read_line("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        if line:
            _take_turn(client, model, messages, line, options)


def _take_turn(
    client: ApiClient, model: str, messages: list[Message], line: str, options: ChatOptions
) -> None:
    """One question and its answer, which both stay in `messages`; neither does when it fails."""
    asked: list[Message] = [*messages, {"role": "user", "content": line}]
    heard: list[str] = []
    try:
        # Closing the stream is what tells the server to stop.
        with closing(client.chat_stream(model, asked, options)) as chunks:
            stream(_overheard(chunks, heard), show=True)
    except KeyboardInterrupt:
        note("(stopped)")
    except EdgerunError as error:
        note(f"error: {error.message}")
        return
    messages[:] = [*asked, {"role": "assistant", "content": "".join(heard)}]


def _overheard(chunks: Iterator[ChatChunk], heard: list[str]) -> Iterator[ChatChunk]:
    for chunk in chunks:
        heard.append(chunk.text)
        yield chunk


def _question(prompt: str | None, default: str | None) -> str | None:
    """PROMPT, then what was piped in, else `default`; None asks for a conversation.

    Raises UsageError when there is nothing to ask and nobody to converse with.
    """
    is_terminal = sys.stdin.isatty()
    try:
        piped = "" if is_terminal else sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"what was piped in is no UTF-8 text: {error.reason}") from error
    question = "\n\n".join(part for part in (prompt, piped) if part) or default
    if question is None and (prompt is not None or not is_terminal):
        raise click.UsageError("nothing to ask: give a PROMPT, or pipe in some text")
    return question


def _enable_line_editing() -> None:
    """Arrow keys and earlier lines in input(); the lines are kept in memory only."""
    try:
        import readline
    except ImportError:  # a Python built without it still reads lines
        return
    readline.parse_and_bind("set enable-bracketed-paste on")


def _to_json(model: str, answer: Answer) -> dict[str, Any]:
    return {
        "model": model,
        "content": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": answer.num_tokens},
        "timing_ms": {"ttft": round(answer.ttft_ms, 1), "total": round(answer.total_ms, 1)},
        "tokens_per_s": round(answer.tokens_per_s, 1),
    }
