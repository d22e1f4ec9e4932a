"""`edgerun doctor`: runs the checks and prints them."""

from __future__ import annotations

import click

from edgerun.cli.checks import Check, run_checks
from edgerun.cli.output import print_json

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """What is wrong on this machine, and how to mend it. Exit 1 when something is.

    \b
    Example:
      edgerun doctor
    """
    checks = []
    for check in run_checks():
        checks.append(check)
        if not as_json:
            _print(check)
    is_well = all(check.status != "fail" for check in checks)
    if as_json:
        print_json({"ok": is_well, "checks": [check.to_json() for check in checks]})
    if not is_well:
        ctx.exit(1)


def _print(check: Check) -> None:
    click.echo(
        f"{click.style(f'{check.status:<4}', fg=_COLOURS[check.status])}  {check.name}: {check.message}"
    )
    if check.mend:
        click.echo(f"      -> {check.mend}")
