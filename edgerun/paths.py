"""Every place on the disk that edgerun uses, in one page (XDG base directories)."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _xdg(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    # The XDG specification says that relative values are to be ignored.
    return Path(value) if value.startswith("/") else Path.home() / fallback


def config_dir() -> Path:
    return _xdg("XDG_CONFIG_HOME", ".config") / "edgerun"


def data_dir() -> Path:
    return _xdg("XDG_DATA_HOME", ".local/share") / "edgerun"


def user_models_dir() -> Path:
    """Weights that were pulled, and models that the user added."""
    return data_dir() / "models"


def cache_dir() -> Path:
    """Safe to delete: native builds, wheels, engines, what was checked before."""
    return _xdg("XDG_CACHE_HOME", ".cache") / "edgerun"


def socket_path() -> Path:
    """The default Unix socket; /tmp/edgerun-UID where there is no runtime directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / "edgerun" / "edgerun.sock"
    return Path(f"/tmp/edgerun-{os.getuid()}") / "edgerun.sock"


def shipped_models_dir() -> Path | None:
    """The `models/` that ships with edgerun: in a checkout beside the package, else share/edgerun/models."""
    checkout = Path(__file__).resolve().parent.parent / "models"
    if (checkout / "smollm2-135m" / "config.toml").is_file():
        return checkout
    installed = Path(sys.prefix) / "share" / "edgerun" / "models"
    return installed if installed.is_dir() else None
