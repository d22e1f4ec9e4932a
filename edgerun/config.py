"""edgerun's settings: one table of names, defaults and meanings, and where each value came from.

defaults < /etc/edgerun/config.toml < ~/.config/edgerun/config.toml < a file named with --config
< EDGERUN_* < flags. Settings of one model live in its own config.toml (see edgerun.repository), not here.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgerun import paths
from edgerun.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Value = str | int | tuple[str, ...]

SYSTEM_FILE = Path("/etc/edgerun/config.toml")
LOG_LEVELS = ("debug", "info", "warning", "error")
_PREFIX = "EDGERUN_"
# Read by edgerun.native itself, which also runs before anything is installed.
_ENVIRONMENT_ONLY = frozenset({"EDGERUN_NATIVE_DIR"})


def _setting(default: Value, help: str, *, is_path: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "is_path": is_path})


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting with its default. In the environment `:` separates folders, `,` names."""

    socket: str = _setting(
        "", 'Unix socket of the server; "" is the default of this user\'s session', is_path=True
    )
    host: str = _setting("127.0.0.1", "address that the server listens on, beside the socket")
    port: int = _setting(8484, "TCP port of the server, 0 to 65535; 0 takes any free one")
    models: tuple[str, ...] = _setting((), "models to load at start; none: the default models")
    model_repository: tuple[str, ...] = _setting(
        (), "folders of models, searched before the user's and the shipped ones", is_path=True
    )
    api_key_file: str = _setting("", "file whose lines are API keys; needed off loopback", is_path=True)
    num_threads: int = _setting(0, "CPU threads of the engine; 0: decided from the device")
    engine_step_timeout_s: int = _setting(
        120, "seconds that one step of a language model may take before the engine is started anew"
    )
    log_level: str = _setting("info", f"one of {', '.join(LOG_LEVELS)}")

    @property
    def socket_path(self) -> Path:
        return Path(self.socket) if self.socket else paths.socket_path()


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """origins[name]: "default", a file, a variable or a flag, as a person would look for it."""

    settings: Settings
    origins: Mapping[str, str]


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    files: Sequence[Path] | None = None,
) -> LoadedSettings:
    """Read all sources. Raises ConfigError for unknown names and unusable values, naming the source.

    flags: by setting name; None, and () for lists, mean not given. config_file must exist; the files of
    `files` (default: system, user) need not.
    """
    loaded = LoadedSettings(Settings(), {item.name: "default" for item in fields(Settings)})
    standard = (SYSTEM_FILE, paths.config_dir() / "config.toml") if files is None else files
    for path in (*standard, *([config_file] if config_file else [])):
        if path.is_file() or path == config_file:
            loaded = _merge(loaded, _read_file(path), {}, str(path))
    loaded = _merge_environment(loaded, os.environ if environ is None else environ)
    given = {name: value for name, value in (flags or {}).items() if value is not None and value != ()}
    return _merge(loaded, given, {name: f"--{name.replace('_', '-')}" for name in given}, "flags")


def nearest(name: str, known: Sequence[str]) -> str:
    """` (did you mean X?)`, or "" when nothing is near; for messages about unknown names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; check that it is there and readable"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _merge_environment(loaded: LoadedSettings, environ: Mapping[str, str]) -> LoadedSettings:
    values: dict[str, object] = {}
    labels: dict[str, str] = {}
    known = {f"{_PREFIX}{item.name.upper()}": item for item in fields(Settings)}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or variable in _ENVIRONMENT_ONLY or text == "":
            continue
        item = known.get(variable)
        if item is None:
            raise ConfigError(
                f"{variable} in the environment is no setting{nearest(variable, list(known))};"
                " `edgerun config show` lists them"
            )
        labels[item.name] = variable
        values[item.name] = _from_text(
            getattr(Settings(), item.name), text, variable, is_path=item.metadata["is_path"]
        )
    return _merge(loaded, values, labels, "environment")


def _from_text(default: Value, text: str, variable: str, *, is_path: bool) -> object:
    if isinstance(default, tuple):
        return [part for part in text.split(os.pathsep if is_path else ",") if part]
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError as error:
            raise ConfigError(f"{variable} is {text!r}; it must be a whole number") from error
    return text


def _merge(
    loaded: LoadedSettings, values: Mapping[str, object], labels: Mapping[str, str], source: str
) -> LoadedSettings:
    """values over loaded. labels: names of single values where `source` is not precise enough."""
    known = {item.name: item for item in fields(Settings)}
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(
                f"unknown setting {name!r} in {source}{nearest(name, list(known))};"
                " `edgerun config show` lists them"
            )
        item = known[name]
        checked = _checked(getattr(Settings(), name), value, f"{name} in {labels.get(name, source)}")
        changed[name] = _expanded(checked) if item.metadata["is_path"] else checked
    settings = replace(loaded.settings, **changed)
    _check_ranges(settings, source)
    return LoadedSettings(
        settings, {**loaded.origins, **{name: labels.get(name, source) for name in changed}}
    )


def _checked(default: Value, value: object, where: str) -> Value:
    if isinstance(default, tuple):
        if (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(isinstance(v, str) for v in value)
        ):
            return tuple(value)
        raise ConfigError(f"{where} is {value!r}; it must be a list of strings")
    if isinstance(default, int):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise ConfigError(f"{where} is {value!r}; it must be a whole number")
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise ConfigError(f"{where} is {value!r}; it must be a string")


def _expanded(value: Value) -> Value:
    """`~` is the user's home, also where no shell saw the value."""
    if isinstance(value, tuple):
        return tuple(str(Path(text).expanduser()) for text in value)
    return str(Path(value).expanduser()) if isinstance(value, str) and value else value


def _check_ranges(settings: Settings, source: str) -> None:
    if not 0 <= settings.port <= 65535:
        raise ConfigError(f"port in {source} is {settings.port}; it must be 0 to 65535")
    if settings.num_threads < 0:
        raise ConfigError(f"num_threads in {source} is {settings.num_threads}; it must be 0 or more")
    if settings.engine_step_timeout_s < 1:
        raise ConfigError(
            f"engine_step_timeout_s in {source} is {settings.engine_step_timeout_s}; it must be 1 or more"
        )
    if settings.log_level not in LOG_LEVELS:
        hint = nearest(settings.log_level, LOG_LEVELS)
        levels = ", ".join(LOG_LEVELS)
        raise ConfigError(
            f"log_level in {source} is {settings.log_level!r}{hint}; it must be one of {levels}"
        )
