"""`edgerun probe`: the device report."""

from __future__ import annotations

from pathlib import Path

import click

from edgerun.cli.output import print_json


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option(
    "--sysroot",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Read the board files under DIR instead of /; nothing is run then.",
)
def probe(as_json: bool, sysroot: Path | None) -> None:
    """What this machine is, and which execution provider runs each kind of model, with the reasons.

    \b
    Example:
      edgerun probe
      edgerun probe --json --sysroot /mnt/board
    """
    from edgerun.device.probe import probe as probe_device
    from edgerun.device.render import render
    from edgerun.device.telemetry import read_load

    report = probe_device(sysroot, use_cache=False)  # who asks for a probe wants one
    if as_json:
        print_json(report.to_json())
        return
    click.echo(render(report, None if sysroot else read_load(report)))
