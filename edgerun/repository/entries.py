"""What the repository answers with: plain records for the server and the command line."""

from __future__ import annotations

from dataclasses import dataclass

from edgerun.repository.spec import ModelKind, Requirement


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the list.

    error is not empty where its config or folder is broken: then kind is a guess and nothing else is filled
    in but name and folder. task: "chat", or the vision task. size_bytes: of the active version, else of the
    one that a pull would fetch; 0: unknown.
    """

    name: str
    kind: ModelKind
    task: str = ""
    versions: tuple[int, ...] = ()  # declared or on this machine, newest first
    is_pulled: bool = False
    active_version: int = 0  # what resolve() gives; 0: nothing is on this machine
    size_bytes: int = 0
    license: str = ""
    description: str = ""
    source: str = ""  # where the weights come from, in words
    require: Requirement = "any"
    folder: str = ""  # where its config lies
    error: str = ""
    notes: tuple[str, ...] = ()  # what `add` assumed


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of a model. path: of the weights; "" where they are not on this machine."""

    version: int
    is_pulled: bool
    is_active: bool
    is_pinned: bool
    size_bytes: int
    source: str
    path: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A file that passed. sha256: as computed; "" where none is known and only the structure was checked."""

    name: str
    version: int  # 0: a bare file
    path: str
    size_bytes: int
    sha256: str
    details: tuple[tuple[str, str], ...]  # what the header says, for people


@dataclass(frozen=True, slots=True)
class Removed:
    """is_forgotten: the model is no longer listed; otherwise its config remains and a pull brings it back."""

    name: str
    freed_bytes: int
    is_forgotten: bool
