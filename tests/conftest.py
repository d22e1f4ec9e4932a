"""Fixtures that several packages use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgerun.errors import NativeLibraryMissing


def pytest_configure() -> None:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as edgerun.cli.main does


@pytest.fixture(scope="session")
def llama_lib_dir() -> Path:
    """The folder of llama.cpp's CPU libraries; tests that ask for it are marked native."""
    from edgerun.native.flavours import find

    try:
        return find("cpu", None).path
    except NativeLibraryMissing as error:
        pytest.skip(f"needs llama.cpp's libraries: {error}")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 150 kB with random weights that takes any text."""
    from edgerun.llm.tiny_model import write_tiny_model

    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path)
    return path
