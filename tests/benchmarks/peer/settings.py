"""What each server is started with: one automatic configuration of ours, for the peer a list to choose from.

Flags are those of llama-server at the llama.cpp that edgerun pins.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.peer.servers import Server, free_port


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """One way to run the peer. name: as `--peer-settings` takes it."""

    name: str
    flags: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([*(f"{key}={value}" for key, value in self.environ.items()), *self.flags])


@dataclass(frozen=True, slots=True)
class OurSettings:
    """Our server; llm: lines of `[llm]` in config.toml, none in the automatic configuration."""

    name: str = "edgerun"
    flags: tuple[str, ...] = ()
    llm: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{key} = {_toml(value)}" for key, value in self.llm.items()]
        return " ".join([*self.flags, *lines]) or "the automatic configuration"


AUTOMATIC = OurSettings()
NO_PREFIX_CACHE = OurSettings("edgerun-no-prefix-cache", ("--no-prefix-cache",))
DETERMINISTIC = OurSettings("edgerun-deterministic", ("--deterministic",))

_STREAMS, _UNIFIED = ("-no-kvu",), ("-kvu",)
_FA_ON, _FA_OFF = ("-fa", "on"), ("-fa", "off")
_SPIN = {"GOMP_SPINCOUNT": "5000"}  # what edgerun gives its own engine (edgerun/engine/process.py)
LAYOUTS = (
    PeerSettings("streams", (*_STREAMS, *_FA_OFF)),
    PeerSettings("streams-fa", (*_STREAMS, *_FA_ON)),
    PeerSettings("unified", (*_UNIFIED, *_FA_OFF)),
    PeerSettings("unified-fa", (*_UNIFIED, *_FA_ON)),
)
MANY_STREAMS = (
    *LAYOUTS,
    PeerSettings("streams-b512", (*_STREAMS, *_FA_OFF, "-b", "512", "-ub", "512")),
    PeerSettings("streams-spin", (*_STREAMS, *_FA_OFF), _SPIN),
    PeerSettings("streams-cram0", (*_STREAMS, *_FA_OFF, "--cache-ram", "0")),
)
ONE_STREAM = (
    LAYOUTS[0],
    LAYOUTS[1],
    PeerSettings("streams-spin", (*_STREAMS, *_FA_OFF), _SPIN),
    PeerSettings("streams-fa-spin", (*_STREAMS, *_FA_ON), _SPIN),
)
LONG_PROMPT = (
    *LAYOUTS,
    PeerSettings("streams-b512", (*_STREAMS, *_FA_OFF, "-b", "512", "-ub", "512")),
    PeerSettings("streams-b128", (*_STREAMS, *_FA_OFF, "-b", "128", "-ub", "128")),
    PeerSettings("streams-b64", (*_STREAMS, *_FA_OFF, "-b", "64", "-ub", "64")),
    PeerSettings("streams-fa-b512", (*_STREAMS, *_FA_ON, "-b", "512", "-ub", "512")),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What is the same for every server of a run. folder: for logs, sockets and configuration files."""

    peer_path: Path
    model_path: Path
    num_threads: int
    has_gpu: bool
    folder: Path

    def peer(self, settings: PeerSettings, num_slots: int, num_cells: int, name: str = "peer") -> Server:
        """llama-server with num_slots slots and num_cells cells of KV cache in all."""
        port, threads = free_port(), str(self.num_threads)
        command = [str(self.peer_path), "-m", str(self.model_path), "--host", "127.0.0.1", "--port"]
        command += [str(port), "-t", threads, "-tb", threads, "-np", str(num_slots), "-c", str(num_cells)]
        command += ["-ngl", "99"] if self.has_gpu else []
        command += settings.flags
        return Server(
            name, command, port=port, ready_path="/health", folder=self.folder, environ=settings.environ
        )

    def ours(self, settings: OurSettings = AUTOMATIC) -> Server:
        port = free_port()
        command = [sys.executable, "-m", "edgerun", "serve", "--port", str(port)]
        command += ["--socket", str(self.folder / f"{settings.name}.sock"), *settings.flags]
        if settings.llm:
            repository = self._repository(settings)
            command += ["--model-repository", str(repository), "--model", "bench"]
        else:
            command += ["--model", str(self.model_path)]
        environ = {"EDGERUN_NUM_THREADS": str(self.num_threads), "EDGERUN_LOG_LEVEL": "info"}
        return Server(
            settings.name, command, port=port, ready_path="/ready", folder=self.folder, environ=environ
        )

    def _repository(self, settings: OurSettings) -> Path:
        """A model folder with the lines of `settings` in its config.toml."""
        repository = self.folder / f"{settings.name}-models"
        version = repository / "bench" / "1"
        version.mkdir(parents=True, exist_ok=True)
        link = version / "model.gguf"
        if not link.exists():
            link.symlink_to(self.model_path)
        lines = ['kind = "llm"', "[llm]", *(f"{key} = {_toml(value)}" for key, value in settings.llm.items())]
        (version.parent / "config.toml").write_text("\n".join(lines) + "\n")
        return repository


def named(choices: Sequence[PeerSettings], name: str) -> PeerSettings | None:
    return next((one for one in choices if one.name == name), None)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
