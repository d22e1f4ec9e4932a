"""`edgerun serve`: the server in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgerun.config import Settings, load_settings
from edgerun.errors import EdgerunError

if TYPE_CHECKING:
    from edgerun.server.serve import Server, ServeSettings


@click.command()
@click.option("--socket", metavar="P", help="Unix socket (default: in this user's runtime folder).")
@click.option("--host", metavar="H", help="Address to listen on, default 127.0.0.1; others need API keys.")
@click.option("--port", type=int, metavar="N", help="TCP port, default 8484; 0 takes any free one.")
@click.option("--no-tcp", is_flag=True, help="Listen on the Unix socket only.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Serve this model only, a name or a .gguf or .onnx file; repeatable. Fetched if missing.",
)
@click.option(
    "--model-repository", multiple=True, metavar="DIR", help="Look for models here first; repeatable."
)
@click.option("--api-key-file", metavar="F", help="Keys that TCP clients must send, one a line.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="F", help="Settings file.")
@click.option("--deterministic", is_flag=True, help="Same answer whatever else runs; slower.")
@click.option("--no-prefix-cache", is_flag=True, help="Compute every prompt anew.")
@click.option("--child", is_flag=True, hidden=True, help="End when stdin ends (see edgerun.server.local).")
def serve(
    socket: str | None,
    host: str | None,
    port: int | None,
    no_tcp: bool,
    models: tuple[str, ...],
    model_repository: tuple[str, ...],
    api_key_file: str | None,
    config_file: Path | None,
    deterministic: bool,
    no_prefix_cache: bool,
    child: bool,
) -> None:
    """Run the server: OpenAI's API on a Unix socket and on this machine's port 8484.

    Prints one line, `ready unix:P http://H:N`, when it can answer. SIGTERM and Ctrl-C let
    running answers end.

    \b
    Example:
      edgerun serve
      edgerun serve --model smollm2-135m --port 0
    """
    import uvloop

    from edgerun import log
    from edgerun.server.local import failure_line

    flags = {
        "socket": socket,
        "host": host,
        "port": port,
        "models": models,
        "model_repository": model_repository,
        "api_key_file": api_key_file,
    }
    try:
        settings = load_settings(flags, config_file=config_file).settings
        log.setup(settings.log_level)
        wanted = _wanted(
            settings, no_tcp=no_tcp, deterministic=deterministic, no_prefix_cache=no_prefix_cache
        )
        uvloop.run(_serve(wanted, settings, child))
    except EdgerunError as error:
        if not child:
            raise
        _say(failure_line(error))
        sys.exit(1)


def _wanted(settings: Settings, *, no_tcp: bool, deterministic: bool, no_prefix_cache: bool) -> ServeSettings:
    from edgerun.server.serve import ServeSettings

    return ServeSettings(
        socket=settings.socket_path,
        host=settings.host,
        port=None if no_tcp else settings.port,
        models=settings.models,
        api_key_file=Path(settings.api_key_file) if settings.api_key_file else None,
        num_threads=settings.num_threads,
        engine_step_timeout_s=settings.engine_step_timeout_s,
        is_deterministic=deterministic,
        has_prefix_cache=not no_prefix_cache,
        log_level=settings.log_level,
    )


async def _serve(wanted: ServeSettings, settings: Settings, is_child: bool) -> None:
    from edgerun.cli.output import progress
    from edgerun.device.probe import probe
    from edgerun.repository.repository import default_repository
    from edgerun.server.serve import Parts, Server, make_engine

    repository = default_repository([Path(folder) for folder in settings.model_repository])
    server = Server(wanted, Parts(probe, repository, make_engine), _say, progress)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    if is_child:
        threading.Thread(target=_stop_at_eof, args=(server, loop), daemon=True).start()
    await server.serve()


def _stop_at_eof(server: Server, loop: asyncio.AbstractEventLoop) -> None:
    """The parent has gone, or is done with us: nobody waits for an answer."""
    # Not sys.stdin: a daemon thread inside its buffer makes the interpreter abort when the server ends.
    while os.read(sys.stdin.fileno(), 65536):
        pass
    loop.call_soon_threadsafe(server.stop)
    loop.call_soon_threadsafe(server.stop)


def _say(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()
