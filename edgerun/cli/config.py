"""`edgerun config`: the settings, their values and where each came from."""

from __future__ import annotations

from dataclasses import fields

import click

from edgerun.cli.output import print_json, print_table
from edgerun.config import Settings, load_settings


@click.group()
def config() -> None:
    """Settings and where they come from.

    \b
    Example:
      edgerun config show
    """


@config.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def show(as_json: bool) -> None:
    """Each setting, its value and where it came from.

    Sources, later ones win: defaults, /etc/edgerun/config.toml, ~/.config/edgerun/config.toml, EDGERUN_*
    variables, flags.

    \b
    Example:
      EDGERUN_PORT=9000 edgerun config show
    """
    loaded = load_settings()
    rows = [
        {
            "name": item.name,
            "value": getattr(loaded.settings, item.name),
            "origin": loaded.origins[item.name],
            "help": item.metadata["help"],
        }
        for item in fields(Settings)
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["setting", "value", "from", "meaning"],
        [(row["name"], _shown(row["value"]), row["origin"], row["help"]) for row in rows],
    )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    return str(value) or "-"
