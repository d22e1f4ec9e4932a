"""The `edgerun` command: finds the subcommand, turns every error into one line and an exit status.

0 done, 1 failed, 2 usage, 130 interrupted. A command's module is imported only when it runs, so that
`edgerun --help` is instant; command modules in turn import heavy things inside their functions.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from edgerun import __version__
from edgerun.errors import EdgerunError

# name -> (module, help). The attribute has the module's last name; the help is repeated here so that listing
# the commands imports none (a test compares them).
COMMANDS: dict[str, tuple[str, str]] = {
    "chat": ("edgerun.cli.chat", "Ask a language model; the answer streams."),
    "classify": ("edgerun.cli.classify", "Name what is in pictures."),
    "demo": ("edgerun.cli.demo", "One answered prompt and one labelled picture, with timings."),
    "serve": ("edgerun.cli.serve", "Run the server."),
    "models": ("edgerun.cli.models", "List, fetch, add and check models."),
    "probe": ("edgerun.cli.probe", "What this machine is, and what runs the models on it."),
    "doctor": ("edgerun.cli.doctor", "What is wrong, and how to mend it."),
    "config": ("edgerun.cli.config", "Settings and where they come from."),
    "native": ("edgerun.cli.native", "llama.cpp's libraries: list them, compile them."),
}


class EdgerunGroup(click.Group):
    """The command table, and the one place where errors become exit statuses."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from edgerun.config import nearest

            ctx.fail(f"no command {args[0]!r}{nearest(args[0], list(COMMANDS))}; see edgerun --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except BrokenPipeError:  # here, since click would make it a failure
            _drop_stdout()
            ctx.exit(0)
        except EdgerunError as error:
            if ctx.params["debug"]:
                raise
            raise OneLineError(error.message) from error
        except OSError as error:  # the machine's: a full disk, a folder that may not be read
            if ctx.params["debug"]:
                raise
            raise OneLineError(_in_words(error)) from error
        except Exception as error:
            if ctx.params["debug"]:
                raise
            raise OneLineError(
                f"{type(error).__name__}: {error}; this is a bug in edgerun, --debug shows where"
            ) from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            # Without the standalone mode click returns the status of an Exit, and leaves errors to us: it
            # would exit with 1 for Ctrl-C.
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            error.show()
            _leave(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            _leave(130)
        except BrokenPipeError:
            _drop_stdout()
            sys.exit(0)
        except OSError as error:  # --help into a full disk, or the last flush
            if "--debug" in sys.argv:
                raise
            _drop_stdout()
            OneLineError(_in_words(error)).show()
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


class OneLineError(click.ClickException):
    """`error: ...` on stderr, exit 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {' '.join(self.message.split())}", file=file, err=True)


@click.group(
    cls=EdgerunGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--debug", is_flag=True, help="Show the whole traceback of an error.")
@click.version_option(__version__, prog_name="edgerun", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Run a language model and vision models together on this device.

    Without a command: a chat on a terminal, else the demo.

    \b
    Example:
      edgerun chat "Why is the sky blue?"
      edgerun classify photo.jpg
    """
    if ctx.invoked_subcommand is not None:
        return
    if sys.stdin.isatty() and sys.stdout.isatty():
        # The terminal UI of the contract is a program of its own; until it is there this is the chat.
        click.echo("This is edgerun's line-by-line chat; `edgerun --help` lists all commands.", err=True)
        ctx.invoke(_command(ctx, "chat"))
    else:
        ctx.invoke(_command(ctx, "demo"))


def _leave(status: int) -> NoReturn:
    """Exit with `status`; Python would exit with 120 when what it still holds cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()
    sys.exit(status)


def _drop_stdout() -> None:
    """The reader (`| head`) has what it wanted; Python would complain again when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _in_words(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason}: {error.filename}" if error.filename else reason


def _command(ctx: click.Context, name: str) -> click.Command:
    assert isinstance(ctx.command, click.Group)
    command = ctx.command.get_command(ctx, name)
    assert command is not None
    return command


def main() -> None:
    """The console script."""
    _mend_streams()
    # ONNX Runtime's wheels send usage data to Microsoft unless this is set before they are loaded: here, as
    # every process of ours that loads them descends from a command.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    cli.main(prog_name="edgerun")


def _mend_streams() -> None:
    """A stream that was closed (`>&-`) is None in Python: nowhere instead. A locale may lack our marks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - as long as we live
            setattr(sys, name, nowhere)
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
