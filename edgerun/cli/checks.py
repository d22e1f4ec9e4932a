"""What `edgerun doctor` looks at: one function for each thing that can be wrong, each with how to mend it.

Nothing here changes anything, and one check that breaks does not stop the others.
"""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from edgerun import paths
from edgerun.config import Settings, load_settings
from edgerun.errors import ConfigError, EdgerunError

Status = Literal["ok", "warn", "fail"]

_PYTHON_FROM, _PYTHON_BEFORE = (3, 10), (3, 14)
# The two default models and the build of llama.cpp together take about 0.8 GB.
_WARN_FREE_BYTES, _FAIL_FREE_BYTES = 2_000_000_000, 200_000_000
_CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. mend: what to do, "" when it is ok."""

    name: str
    status: Status
    message: str
    mend: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def run_checks() -> Iterator[Check]:
    """All findings, as they come; the slow ones take a few seconds."""
    settings = Settings()
    try:
        settings = load_settings().settings
        yield Check("settings", "ok", "all of them are valid")
    except ConfigError as error:
        yield Check("settings", "fail", error.message, "correct it; the other checks use the defaults")
    checks: tuple[tuple[str, Callable[[Settings], list[Check]]], ...] = (
        ("python", lambda _: [check_python(sys.version_info[:2])]),
        ("packages", lambda _: check_packages()),
        ("llama.cpp", lambda _: [check_native()]),
        ("models", check_models),
        ("providers", lambda _: check_providers()),
        ("socket", lambda settings: [check_socket(settings.socket_path)]),
        ("port", lambda settings: [check_port(settings)]),
        ("disk", lambda _: [check_disk(paths.data_dir()), check_disk(paths.cache_dir())]),
    )
    for name, check in checks:
        try:
            yield from check(settings)
        except EdgerunError as error:
            yield Check(name, "fail", error.message)
        except Exception as error:  # the doctor must reach its last check
            yield Check(name, "fail", f"{type(error).__name__}: {error}", "report this as a bug in edgerun")


def check_python(version: tuple[int, int]) -> Check:
    text = f"Python {version[0]}.{version[1]}"
    if _PYTHON_FROM <= version < _PYTHON_BEFORE:
        return Check("python", "ok", text)
    return Check("python", "fail", f"{text} is not supported", "use Python 3.10 to 3.13")


def check_packages() -> list[Check]:
    from edgerun.errors import DeviceError, NativeLibraryMissing
    from edgerun.native.extras import require_extra
    from edgerun.native.onnx_packages import check_one_onnxruntime

    checks = []
    for module in ("llama_cpp", "onnxruntime"):
        try:
            require_extra(module)
            checks.append(Check(module, "ok", "installed"))
        except NativeLibraryMissing as error:
            checks.append(Check(module, "fail", error.message, "install the extra"))
    try:
        check_one_onnxruntime()
    except DeviceError as error:
        checks.append(Check("onnxruntime", "fail", error.message, "uninstall both, install one"))
    return checks


def check_native() -> Check:
    """Some flavour fits this machine, and its files are those that were built."""
    from edgerun.errors import NativeLibraryMissing
    from edgerun.native.flavours import candidates, verify

    problems = []
    for candidate in candidates():
        flavour = candidate.flavour
        problem = candidate.problem or verify(flavour)
        if problem is None:
            return Check("llama.cpp", "ok", f"{flavour.name}: {flavour.path} ({flavour.origin})")
        problems.append(f"{flavour.path} {problem}")
    found = "; ".join(problems) or "its libraries are not on this machine"
    error = NativeLibraryMissing(found)
    return Check("llama.cpp", "fail", error.message, "run `edgerun native ensure`")


def check_models(settings: Settings) -> list[Check]:
    """Every model of the repositories: fetched, and as its config says."""
    from edgerun.repository.repository import default_repository

    repository = default_repository([Path(folder) for folder in settings.model_repository])
    checks = []
    for entry in repository.list():
        name = f"model {entry.name}"
        if not entry.is_pulled:
            checks.append(
                Check(name, "warn", "its weights are not here", f"run `edgerun models pull {entry.name}`")
            )
            continue
        try:
            repository.verify(entry.name)
            checks.append(Check(name, "ok", "its weights are whole"))
        except EdgerunError as error:
            checks.append(Check(name, "fail", error.message, f"run `edgerun models pull {entry.name}`"))
    return checks or [
        Check("models", "fail", "no model is known", "run it from a checkout, or reinstall edgerun")
    ]


def check_providers() -> list[Check]:
    """What the probe chose for each kind, after running something on it."""
    from edgerun.device.probe import probe

    report = probe()
    checks = []
    for kind in ("llm", "vision"):
        choices = [choice for choice in report.providers if choice.kind == kind]
        chosen = next((choice for choice in choices if choice.chosen), None)
        rejected = "; ".join(f"{c.provider}: {c.reason}" for c in choices if not c.chosen)
        if chosen is None:
            checks.append(Check(f"{kind} provider", "fail", f"none works: {rejected}", "see the reasons"))
        elif report.accelerators and not chosen.is_gpu:
            message = f"{chosen.provider}, though there is a GPU ({rejected})"
            checks.append(Check(f"{kind} provider", "warn", message, "see the reasons"))
        else:
            checks.append(Check(f"{kind} provider", "ok", f"{chosen.provider}: {chosen.reason}"))
    return checks


def check_socket(path: Path) -> Check:
    if not path.exists():
        return Check("socket", "ok", f"no server runs on {path}")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CONNECT_TIMEOUT_S)
        try:
            client.connect(str(path))
        except PermissionError:
            return Check(
                "socket", "fail", f"{path} belongs to another user", "set EDGERUN_SOCKET to a path of yours"
            )
        except OSError as error:
            return Check(
                "socket", "warn", f"{path} is there, but nobody answers ({error.strerror})", f"rm {path}"
            )
    return Check("socket", "ok", f"a server answers on {path}")


def check_port(settings: Settings) -> Check:
    """Free for the server to take, or taken by the server that runs."""
    where = f"{settings.host}:{settings.port}"
    if settings.port == 0:
        return Check("port", "ok", "any free one")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((settings.host, settings.port))
        except OSError as error:
            if check_socket(settings.socket_path).message.startswith("a server answers"):
                return Check("port", "ok", f"{where} is taken, and an edgerun server runs")
            return Check("port", "fail", f"{where}: {error.strerror}", "set EDGERUN_PORT to another one")
    return Check("port", "ok", f"{where} is free")


def check_disk(folder: Path) -> Check:
    """folder may not exist yet: then the first parent that does counts."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    message = f"{free / 1e9:.1f} GB free for {folder}"
    if free < _FAIL_FREE_BYTES:
        return Check("disk", "fail", message, "make room; models and builds go there")
    if free < _WARN_FREE_BYTES:
        return Check("disk", "warn", message, "make room before you fetch another model")
    return Check("disk", "ok", message)
