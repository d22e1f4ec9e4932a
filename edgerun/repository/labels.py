"""Label files: one name a line. Finds the one that belongs to a model that came without a config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgerun.errors import ConfigError
from edgerun.repository.files import read_text

_MAX_LABEL_BYTES = 16 << 20  # the largest public label set (ImageNet-21k) has under 1 MB


@dataclass(frozen=True, slots=True)
class FoundLabels:
    """path None: none was chosen. note: a sentence that says what was chosen and why."""

    path: Path | None
    note: str


def read_labels(path: Path) -> tuple[str, ...]:
    """The names in order. Raises ConfigError for what is no label file: an empty line shifts the rest."""
    text = read_text(path, _MAX_LABEL_BYTES)
    # Only line ends split: some label sets have other separators inside a name.
    labels = [line.strip() for line in text.rstrip().replace("\r\n", "\n").split("\n")]
    if not any(labels):
        raise ConfigError(f"{path} holds no labels")
    if "" in labels:
        raise ConfigError(
            f"{path}: line {labels.index('') + 1} is empty, so the labels after it would be one off"
        )
    return tuple(labels)


def find_labels(model: Path, num_classes: int, folder: Path | None = None) -> FoundLabels:
    """The only labels*.txt or <stem>.txt beside `model` with as many lines as it has classes.

    folder: the model's own, looked into when nothing beside the model fits. Its labels.txt is taken whatever
    it holds: it is meant for this model, and loading says when the numbers differ.
    """
    without = "without labels the answers are class numbers"
    beside = _fitting(model.parent, model.stem, num_classes) if num_classes else []
    if folder is not None and not beside and (folder / "labels.txt").is_file():
        return FoundLabels((folder / "labels.txt").absolute(), "labels from labels.txt")
    if num_classes == 0:
        return FoundLabels(None, f"its number of classes is not declared; name a labels file; {without}")
    for place in (model.parent, folder):
        fitting = _fitting(place, model.stem, num_classes) if place else []
        if len(fitting) == 1:
            return FoundLabels(fitting[0].absolute(), f"labels from {fitting[0].name} ({num_classes} lines)")
        if fitting:
            names = ", ".join(path.name for path in fitting)
            return FoundLabels(None, f"{names} all have {num_classes} lines; choose one as labels; {without}")
    return FoundLabels(None, f"no labels*.txt beside it has {num_classes} lines; {without}")


def _fitting(folder: Path, stem: str, num_classes: int) -> list[Path]:
    candidates = sorted({*folder.glob("labels*.txt"), folder / f"{stem}.txt"})
    return [path for path in candidates if path.is_file() and _count(path) == num_classes]


def _count(path: Path) -> int:
    try:
        return len(read_labels(path))
    except ConfigError:
        return 0
