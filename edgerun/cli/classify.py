"""`edgerun classify`: files, folders and globs to rows of labels."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from edgerun.cli.chat import DEFAULT_VISION
from edgerun.cli.client import ApiClient, connect
from edgerun.cli.output import note, print_json, progress
from edgerun.config import load_settings
from edgerun.errors import EdgerunError

# What the server reads, by the end of the name: only used to choose the files of a folder.
_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".pgm"}
)
_NUM_REQUESTS = 4  # at once: one is decoded while others are in the model's batch
_MANY = 8  # from here on progress is shown

Row = dict[str, Any]


@click.command()
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
@click.option("-m", "--model", metavar="NAME", help=f"Vision model (default: {DEFAULT_VISION}).")
@click.option(
    "--top", type=click.IntRange(1, 1000), default=5, metavar="K", show_default=True, help="Labels."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array with a row for each file.")
@click.option("--no-server", is_flag=True, help="Load the model for this call, even if a server runs.")
@click.pass_context
def classify(
    ctx: click.Context, images: Sequence[str], model: str | None, top: int, as_json: bool, no_server: bool
) -> None:
    """Name what is in pictures: files, folders (with all below them) and globs.

    A file that is no picture gets a row with an error; the exit status is then 1.

    \b
    Example:
      edgerun classify photo.jpg --top 3
      edgerun classify holiday/ '**/*.png' --json
    """
    if "" in images:  # a variable that is not set; as a path it would be the current folder
        raise click.UsageError("an IMAGE is empty; name a file, a folder or a glob")
    files = list(expand(images))
    settings = load_settings().settings
    with connect(settings, models=[model or DEFAULT_VISION], no_server=no_server) as client:
        name = client.pick_model("vision", model, DEFAULT_VISION)
        rows = _classify_all(client, files, name, top, as_json)
    if as_json:
        print_json(rows)
    if any("error" in row for row in rows):
        ctx.exit(1)


def expand(patterns: Sequence[str]) -> Iterator[Path]:
    """Files in the order asked for, each once. What does not exist comes too, to be reported in its row."""
    seen: set[Path] = set()
    for pattern in patterns:
        for path in _matches(pattern):
            if path not in seen:
                seen.add(path)
                yield path


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        return _pictures_below(path) or [path]
    if path.exists():  # first: a file's name may hold brackets
        return [path]
    found: list[Path] = []
    for name in sorted(glob.glob(pattern, recursive=True)):  # noqa: PTH207 - Path.glob takes no absolute one
        match = Path(name)
        found += _pictures_below(match) if match.is_dir() else [match]
    return found or [path]


def _pictures_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file())


def _classify_all(
    client: ApiClient, files: Sequence[Path], model: str, top_k: int, as_json: bool
) -> list[Row]:
    """A row for each file, in order; printed as they come unless they end up in one JSON document."""
    rows: list[Row] = []
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        try:
            results = pool.map(lambda file: row_of(client, file, model, top_k), files)
            if len(files) < _MANY or not sys.stderr.isatty():
                for row in results:
                    rows.append(row)
                    _print(row, as_json)
                return rows
            with progress("classify") as report:
                for row in results:
                    rows.append(row)
                    _print(row, as_json)
                    report(row["file"], len(rows), len(files))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for a folder of pictures
            raise
    return rows


def row_of(client: ApiClient, file: Path, model: str, top_k: int) -> Row:
    """The contract's row; a failure of this file becomes its "error"."""
    if file.is_dir():
        return {"file": str(file), "model": model, "error": "there are no pictures in this folder"}
    try:
        found = client.classify(file, model=model, top_k=top_k)
    except EdgerunError as error:
        return {"file": str(file), "model": model, "error": error.message}
    return {
        "file": str(file),
        "model": found.model,
        "provider": found.provider,
        "predictions": list(found.predictions),
        "timing_ms": dict(found.timing_ms),
    }


def _print(row: Row, as_json: bool) -> None:
    if as_json:
        return
    if "error" in row:
        note(f"{row['file']}: error: {row['error']}")
        return
    total_ms = row["timing_ms"].get("total")
    time = "" if total_ms is None else f"  ({total_ms:.1f} ms, {row['provider']})"
    click.echo(f"{row['file']}{time}")
    for prediction in row["predictions"]:
        click.echo(f"  {prediction['score']:6.1%}  {prediction['label']}")
