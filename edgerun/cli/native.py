"""`edgerun native`: llama.cpp's libraries on this machine."""

from __future__ import annotations

import click

from edgerun.cli.output import note, print_json, print_table, progress


@click.group()
def native() -> None:
    """llama.cpp's libraries: list them, compile them.

    \b
    Example:
      edgerun native ensure
    """


@native.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def list_(as_json: bool) -> None:
    """The folders of libraries that are there, and whether they fit this machine.

    \b
    Example:
      edgerun native list
    """
    from edgerun.native.flavours import candidates, verify

    rows = []
    for candidate in candidates():
        flavour = candidate.flavour
        rows.append(
            {
                "name": flavour.name,
                "provider": candidate.provider,
                "path": str(flavour.path),
                "origin": flavour.origin,
                "problem": candidate.problem or verify(flavour),
            }
        )
    if as_json:
        print_json(rows)
        return
    print_table(
        ["flavour", "path", "found", "state"],
        [(str(r["name"]), str(r["path"]), str(r["origin"]), r["problem"] or "fits") for r in rows],
    )
    if not rows:
        note("none; `edgerun native ensure` compiles them")


@native.command()
def ensure() -> None:
    """Compile llama.cpp for this CPU, unless that was done before.

    \b
    Example:
      edgerun native ensure
    """
    from edgerun.native.build import ensure_cpu

    with progress("llama.cpp") as report:
        flavour = ensure_cpu(report)
    click.echo(f"{flavour.name}: {flavour.path} ({flavour.origin})")
