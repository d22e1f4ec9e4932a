"""Writes the config of a model that a user adds by reference: the file stays where it is.

The config says what was assumed, in comments, as it is the place where a person corrects it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from edgerun.errors import InvalidModelFile
from edgerun.repository.catalog import describe
from edgerun.repository.gguf_file import GgufSummary, model_stem
from edgerun.repository.inspection import PATH_SUFFIXES, check_structure, infer_vision_settings
from edgerun.repository.labels import read_labels
from edgerun.repository.spec import PreprocessSpec, VisionSettings


@dataclass(frozen=True, slots=True)
class Draft:
    """A config to be written, and what was assumed in it."""

    text: str
    notes: tuple[str, ...]


def name_of(path: Path) -> str:
    """A model's name from its file's: what is not allowed in names becomes "-"."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model_stem(path)).strip("-._")[:100]
    while name.lower().endswith(PATH_SUFFIXES):  # a name must not read like a path
        name = name.rpartition(".")[0]
    return name or "model"


def draft_config(path: Path, labels: Path | None) -> Draft:
    """The config.toml for a bare file. Raises InvalidModelFile, and ConfigError for unreadable labels."""
    summary = check_structure(path)
    if isinstance(summary, GgufSummary):
        return _draft_llm(path, summary, labels)
    guess = infer_vision_settings(path, summary)
    settings, notes = guess.settings, list(guess.notes)
    if labels is not None:
        num_labels = len(read_labels(labels))
        if guess.num_classes and num_labels != guess.num_classes:
            raise InvalidModelFile(
                f"{labels.name} has {num_labels} labels and {path.name} has {guess.num_classes} classes; "
                "give a file with one label for each class (a background class has its line too)",
                path=str(path),
            )
        settings = replace(settings, labels=str(labels.absolute()))
        notes = [note for note in notes if "label" not in note]
    document = _document("vision", "", "", notes)
    document["vision"] = _vision_table(settings)
    _add_version(document, path)
    return Draft(tomlkit.dumps(document), tuple(notes))


def _draft_llm(path: Path, summary: GgufSummary, labels: Path | None) -> Draft:
    if labels is not None:
        raise InvalidModelFile(f"{path.name} is a language model: it takes no labels", path=str(path))
    notes = []
    if not summary.has_chat_template:
        notes.append("the file has no chat template, so only plain completion can be expected of it")
    document = _document("llm", describe(summary), summary.license, notes)
    table = tomlkit.table()
    length = summary.context_length
    table.add(
        tomlkit.comment(f"max_model_len = {length or 4096}  # tokens; left out: what the model can take")
    )
    document["llm"] = table
    _add_version(document, path)
    return Draft(tomlkit.dumps(document), tuple(notes))


def _document(kind: str, description: str, license_name: str, notes: Sequence[str]) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    document.add(tomlkit.comment("Written by `edgerun models add`; yours to change."))
    for note in notes:
        document.add(tomlkit.comment(f"{_one_line(note)}"))
    document["kind"] = kind
    document["description"] = description
    document["license"] = license_name
    return document


def _one_line(text: str) -> str:
    """Names inside a model may hold anything; a comment must not end early."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _vision_table(settings: VisionSettings) -> Table:
    default, table = VisionSettings(), tomlkit.table()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name == "preprocess":
            table["preprocess"] = _preprocess_table(value)
        elif value != getattr(default, field.name) or field.name in ("task", "output_kind"):
            table[field.name] = value
    return table


def _preprocess_table(spec: PreprocessSpec) -> Table:
    """Every field, as each of them is a guess that a person may have to correct."""
    table = tomlkit.table()
    values: dict[str, Any] = dataclasses.asdict(spec)
    if spec.in_graph:
        del values["mean"], values["std"]
    for key, value in values.items():
        table[key] = list(value) if isinstance(value, tuple) else value
    return table


def _add_version(document: tomlkit.TOMLDocument, path: Path) -> None:
    source = tomlkit.table()
    source["type"] = "file"
    source["path"] = str(path.absolute())
    sources = tomlkit.aot()
    sources.append(source)
    version = tomlkit.table()
    version["version"] = 1
    version["sources"] = sources
    versions = tomlkit.aot()
    versions.append(version)
    document["versions"] = versions
