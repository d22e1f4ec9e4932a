"""How commands print: results on stdout, everything else on stderr.

Rich is imported inside the functions, as it is not needed for `--json` and `--help`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

_SURELY_BYTES = 100_000  # no step of ours counts that many of anything else

Report = Callable[[str, int, int], None]
"""(stage, done, total); total 0: unknown."""


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # a locale without UTF-8, or a file name that is none
        text = json.dumps(value, indent=2)
    click.echo(text)


def note(text: str) -> None:
    """A remark for a person, on stderr."""
    click.echo(text, err=True)


def console(*, err: bool = False) -> Console:
    """A console on the current stdout or stderr; markup is off, as texts may hold brackets."""
    from rich.console import Console

    return Console(file=sys.stderr if err else sys.stdout, markup=False, highlight=False, emoji=False)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On a terminal a table that fits its width, else lines with tabs between the cells and no headers."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(row))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)


def format_bytes(num_bytes: int) -> str:
    """1500000 -> "1.5 MB": powers of 1000, as download pages count."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


@contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[Report]:
    """Show a long step on stderr: a bar on a terminal, one line for each stage elsewhere.

    in_bytes: done and total are bytes; large numbers are taken for bytes anyway.
    """
    if not sys.stderr.isatty():
        yield _StageLines(what)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )
    bar = Progress(
        *columns,
        console=console(err=True),
        transient=True,
        # Lines printed meanwhile go above the bar; those of a stdout that is no terminal must stay there.
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=None, amount="")

        def report(stage: str, done: int, total: int) -> None:
            bar.update(
                task,
                description=f"{what}: {stage}",
                completed=done,
                total=total or None,
                amount=amount(done, total, in_bytes=in_bytes),
            )

        yield report


def amount(done: int, total: int, *, in_bytes: bool) -> str:
    """How far a step is, in words; "" where nobody knows."""
    if not done and not total:
        return ""
    is_bytes = in_bytes or max(done, total) >= _SURELY_BYTES
    parts = [format_bytes(number) if is_bytes else str(number) for number in (done, total) if number or total]
    return " of ".join(parts)


class _StageLines:
    """For logs: says when a stage begins."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            note(f"{self._what}: {stage}")


def rows_of(mapping: Mapping[str, object]) -> list[tuple[str, str]]:
    """Rows for print_table; None is a dash."""
    return [(key, "-" if value is None else str(value)) for key, value in mapping.items()]
