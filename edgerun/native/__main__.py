"""`python -m edgerun.native`: what the Makefile calls before edgerun's own command line can run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgerun.errors import EdgerunError
from edgerun.native.build import ensure_cpu
from edgerun.native.flavours import candidates, ensure_command, verify
from edgerun.native.progress import ProgressLines
from edgerun.native.python_layer import install


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 failed, 130 interrupted (argparse itself exits with 2)."""
    options = _parser().parse_args(arguments)
    progress = ProgressLines(sys.stderr, is_terminal=sys.stderr.isatty())
    try:
        if options.command == "install":
            extras = [name for name in options.extras.split(",") if name]
            install(options.editable, extras, progress)
        elif options.command == "ensure":
            flavour = ensure_cpu(progress)
            progress.close()
            sys.stdout.write(f"{flavour.name}: {flavour.path} ({flavour.origin})\n")
        else:
            sys.stdout.write(_listing())
    except EdgerunError as error:
        progress.close()
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        progress.close()
        sys.stderr.write("interrupted; nothing half-made was left\n")
        return 130
    progress.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m edgerun.native", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ensure", help="compile llama.cpp for this CPU unless that was done before")
    commands.add_parser("list", help="the folders of native libraries that are there, and whether they fit")
    command = commands.add_parser(
        "install", help="install llama-cpp-python without compiling it, and edgerun"
    )
    command.add_argument("--editable", type=Path, help="also install edgerun from this checkout")
    command.add_argument("--extras", default="", help="extras of edgerun, with commas: cpu,tui")
    return parser


def _listing() -> str:
    lines = []
    for candidate in candidates():
        flavour = candidate.flavour
        problem = candidate.problem or verify(flavour)
        lines.append(f"{flavour.name}: {flavour.path} ({flavour.origin}) {problem or 'fits'}\n")
    return "".join(lines) or f"none; run `{ensure_command()}`\n"


if __name__ == "__main__":
    sys.exit(main())
