"""`edgerun demo`: everything once, from nothing: device, one answer, one label, with timings."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import click

from edgerun.cli.chat import DEFAULT_LLM, DEFAULT_VISION, stream
from edgerun.cli.client import ApiClient, ChatOptions, connect
from edgerun.cli.output import note, progress
from edgerun.config import load_settings
from edgerun.errors import NativeLibraryMissing

_PROMPT = "What is the capital of France? Answer in one sentence."
_MAX_TOKENS = 64


@click.command()
@click.option("--no-server", is_flag=True, help="Load the models for this call, even if a server runs.")
def demo(no_server: bool) -> None:
    """The device report, one answered prompt and one labelled picture, with timings and providers.

    Fetches the two default models and compiles llama.cpp first where that was not done yet.

    \b
    Example:
      edgerun demo
    """
    from edgerun.device.probe import probe
    from edgerun.device.render import render

    start = time.perf_counter()
    settings = load_settings().settings
    _ensure_native()
    click.echo(render(probe()))
    with connect(settings, models=[DEFAULT_LLM, DEFAULT_VISION], no_server=no_server) as client:
        show_answer(client, client.pick_model("llm", None, DEFAULT_LLM))
        show_label(client, client.pick_model("vision", None, DEFAULT_VISION), sample_photo())
    click.echo(f"\nAll of it took {time.perf_counter() - start:.1f} s. Next: edgerun chat, edgerun --help")


def sample_photo() -> Path:
    """The CC0 photo that ships beside this module."""
    return Path(__file__).with_name("samples") / "coffee.jpg"


def show_answer(client: ApiClient, model: str) -> None:
    """One greedy answer, streamed, how fast it came and what it ran on."""
    click.echo(f"\n{model}\n> {_PROMPT}")
    options = ChatOptions(max_tokens=_MAX_TOKENS, temperature=0)
    with closing(client.chat_stream(model, [{"role": "user", "content": _PROMPT}], options)) as chunks:
        answer = stream(chunks, show=True)
    click.echo(
        f"  first token after {answer.ttft_ms:.0f} ms, then {answer.tokens_per_s:.1f} tokens/s"
        f" ({answer.num_tokens} tokens, {_provider(client, model)})"
    )


def show_label(client: ApiClient, model: str, photo: Path) -> None:
    """The best label of a photo, and how long the whole way took."""
    start = time.perf_counter()
    found = client.classify(photo, model=model, top_k=1)
    took_ms = (time.perf_counter() - start) * 1000
    best = found.predictions[0]
    click.echo(f"\n{model}\n> {photo.name}\n{best['label']} ({best['score']:.0%})")
    click.echo(f"  {took_ms:.0f} ms from file to label ({found.provider})")


def _provider(client: ApiClient, model: str) -> str:
    """What the loaded model really runs on."""
    return next((card.provider for card in client.models() if card.name == model), None) or "not loaded"


def _ensure_native() -> None:
    from edgerun.native.build import ensure_cpu
    from edgerun.native.extras import require_extra
    from edgerun.native.flavours import find

    for module in ("llama_cpp", "onnxruntime"):
        require_extra(module)  # before minutes of compiling for nothing
    try:
        find("cuda")
    except NativeLibraryMissing:
        with progress("llama.cpp") as report:
            flavour = ensure_cpu(report)
        note(f"llama.cpp: {flavour.path} ({flavour.origin})")
