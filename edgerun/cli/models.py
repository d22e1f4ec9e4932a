"""`edgerun models`: the model repository from the command line.

Works on the files directly; a running server sees the change the next time it loads the model.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgerun.cli.output import format_bytes, note, print_json, print_table, progress, rows_of

if TYPE_CHECKING:
    from edgerun.engine.messages import LlmTuning
    from edgerun.repository.repository import ModelEntry, Repository

Command = Callable[..., None]


def common_options(command: Command) -> Command:
    """--model-repository and --json, the same for every command of the group."""
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)
    return click.option(
        "--model-repository",
        "roots",
        multiple=True,
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="A folder of models, looked into before the usual ones; may be repeated.",
    )(command)


@click.group()
def models() -> None:
    """List, fetch, add and check models.

    Example: edgerun models list
    """


@models.command("list")
@common_options
def list_models(roots: tuple[Path, ...], as_json: bool) -> None:
    """Show all models and whether their weights are here.

    Example: edgerun models list
    """
    entries = _repository(roots).list()
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in entries])
        return
    rows = [_list_row(entry) for entry in entries]
    print_table(("name", "task", "version", "size", "state", "description"), rows)
    for entry in entries:
        if entry.error:
            note(f"{entry.name}: {entry.error}")


@models.command()
@click.argument("name")
@common_options
def show(name: str, roots: tuple[Path, ...], as_json: bool) -> None:
    """Show what is known of a model.

    Example: edgerun models show smollm2-135m
    """
    repository = _repository(roots)
    entry = repository.get(name)
    header = repository.details(name) if entry.is_pulled else ()
    is_llm = entry.is_pulled and entry.kind == "llm"
    measured = _measured(repository, name) if is_llm else None
    if as_json:
        tuning = {"provider": measured[0], **_plain(measured[1])} if measured else None
        print_json({**dataclasses.asdict(entry), "file": dict(header), "tuning": tuning})
        return
    values = {**dataclasses.asdict(entry), "versions": ", ".join(map(str, entry.versions)), "notes": ""}
    filled = [(key, text) for key, text in rows_of(values) if text]
    print_table(("", ""), [*filled, *header, *(_tuning_rows(measured) if is_llm else ())])


@models.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", help="The model's name; default: the file's.")
@click.option("--labels", type=click.Path(path_type=Path), help="A file with one label a line, for an .onnx.")
@common_options
def add(file: Path, name: str | None, labels: Path | None, roots: tuple[Path, ...], as_json: bool) -> None:
    """Make a .gguf or .onnx file of yours a model; the file stays where it is.

    Example: edgerun models add ~/Downloads/model.gguf --name mine
    """
    entry = _repository(roots).add(file, name=name, labels=labels)
    if as_json:
        print_json(dataclasses.asdict(entry))
        return
    click.echo(f"added {entry.name} ({entry.task}); its settings: {entry.folder}/config.toml")
    for text in entry.notes:
        note(f"  {text}")


@models.command()
@click.argument("name")
@click.option("--version", type=int, help="A version that the model's config declares; default: the newest.")
@common_options
def pull(name: str, version: int | None, roots: tuple[Path, ...], as_json: bool) -> None:
    """Fetch a model's weights; continues where an interrupted pull ended.

    Example: edgerun models pull smollm2-135m
    """
    with progress(name, in_bytes=True) as report:
        spec = _repository(roots).pull(name, report, version)
    if as_json:
        print_json(
            {
                "name": spec.name,
                "version": spec.version,
                "path": spec.path,
                "size_bytes": spec.size_bytes,
                "sha256": spec.sha256,
            }
        )
        return
    click.echo(f"{spec.name} version {spec.version} is here: {spec.path} ({format_bytes(spec.size_bytes)})")


@models.command()
@click.argument("name")
@common_options
def verify(name: str, roots: tuple[Path, ...], as_json: bool) -> None:
    """Check that a model's file, or any .gguf or .onnx file, is whole.

    Example: edgerun models verify smollm2-135m; edgerun models verify ./model.gguf
    """
    with progress(name, in_bytes=True) as report:
        result = _repository(roots).verify(name, report)
    if as_json:
        print_json({**dataclasses.asdict(result), "details": dict(result.details)})
        return
    how = f"sha256 {result.sha256}" if result.sha256 else "structure only, as no sha256 is known"
    click.echo(f"{result.path} is whole ({format_bytes(result.size_bytes)}, {how})")


@models.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common_options
def rm(name: str, yes: bool, roots: tuple[Path, ...], as_json: bool) -> None:
    """Delete a model's weights from the store; files added by reference stay.

    Example: edgerun models rm smollm2-135m --yes
    """
    repository = _repository(roots)
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete what the store has of {name}?", abort=True, err=True)
    removed = repository.remove(name)
    if as_json:
        print_json(dataclasses.asdict(removed))
        return
    after = "is forgotten" if removed.is_forgotten else "is still listed; a pull brings it back"
    click.echo(f"{name}: {format_bytes(removed.freed_bytes)} freed; the model {after}")


@models.command()
@click.argument("name")
@common_options
def versions(name: str, roots: tuple[Path, ...], as_json: bool) -> None:
    """List a model's versions; * marks the one that is served.

    Example: edgerun models versions smollm2-135m
    """
    infos = _repository(roots).versions(name)
    if as_json:
        print_json([dataclasses.asdict(info) for info in infos])
        return
    rows = [
        (
            f"{info.version}{' *' if info.is_active else ''}",
            format_bytes(info.size_bytes) if info.size_bytes else "?",
            "pinned by a rollback" if info.is_pinned else "here" if info.is_pulled else "not pulled",
            info.source,
        )
        for info in infos
    ]
    print_table(("version", "size", "state", "source"), rows)


@models.command()
@click.argument("name")
@click.option("--to", type=int, help="The version to go to; default: the one before the active one.")
@click.option("--undo", is_flag=True, help="Go back to what the version policy says.")
@common_options
def rollback(name: str, to: int | None, undo: bool, roots: tuple[Path, ...], as_json: bool) -> None:
    """Serve an earlier version that is on this machine.

    Example: edgerun models rollback mine; edgerun models rollback mine --undo
    """
    if undo and to is not None:
        raise click.UsageError("give --to or --undo, not both")
    repository = _repository(roots)
    version = repository.undo_rollback(name) if undo else repository.rollback(name, to)
    if as_json:
        print_json({"name": name, "version": version})
        return
    click.echo(f"{name}: version {version} is served from the next load on")


def _measured(repository: Repository, name: str) -> tuple[str, LlmTuning] | None:
    """Provider and choice of the last first load; None before it."""
    from edgerun.engine.check import CheckedModels

    return CheckedModels().tuning_of(repository.resolve(name))


def _plain(tuning: LlmTuning) -> dict[str, object]:
    return {
        "kv_layout": tuning.kv_layout,
        "flash_attention": tuning.flash_attention,
        "num_threads": tuning.num_threads,
        "trials": list(tuning.trials),
    }


def _tuning_rows(measured: tuple[str, LlmTuning] | None) -> list[tuple[str, str]]:
    if measured is None:
        return [("fastest here", "measured at the first load")]
    provider, tuning = measured
    flash = "on" if tuning.flash_attention else "off"
    choice = f"{tuning.kv_layout}, flash attention {flash}, {tuning.num_threads} threads ({provider})"
    return [("fastest here", choice), *(("tried", trial) for trial in tuning.trials)]


def _repository(roots: tuple[Path, ...]) -> Repository:
    """The folders of the command line first, then those of the settings, then the usual ones."""
    from edgerun.repository.repository import default_repository

    return default_repository([*roots, *_configured_roots()])


def _configured_roots() -> list[Path]:
    from edgerun.config import load_settings

    return [Path(folder) for folder in load_settings().settings.model_repository]


def _list_row(entry: ModelEntry) -> tuple[str, ...]:
    state = "broken" if entry.error else "here" if entry.is_pulled else "not pulled"
    version = entry.active_version or next(iter(entry.versions), 0)
    return (
        entry.name,
        entry.task,
        str(version or ""),
        format_bytes(entry.size_bytes) if entry.size_bytes else "",
        state,
        entry.description,
    )
