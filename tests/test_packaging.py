"""What pyproject.toml promises and the code relies on."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from edgerun import __version__
from edgerun.native import LLAMA_CPP_PYTHON

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def requirements(project: dict[str, Any]) -> list[str]:
    extras = project["project"]["optional-dependencies"].values()
    return [*project["project"]["dependencies"], *(line for extra in extras for line in extra)]


def test_llama_cpp_python_is_pinned_to_the_version_that_native_builds(project: dict[str, Any]) -> None:
    pins = {line for line in requirements(project) if line.startswith("llama-cpp-python")}
    assert pins == {f"llama-cpp-python=={LLAMA_CPP_PYTHON}"}


def test_contracted_extras_exist(project: dict[str, Any]) -> None:
    assert {"cpu", "cuda", "tensorrt", "rtx", "tui", "test"} <= set(
        project["project"]["optional-dependencies"]
    )


def test_no_extra_brings_both_onnxruntimes(project: dict[str, Any]) -> None:
    def expanded(name: str) -> set[str]:
        lines: set[str] = set()
        for line in project["project"]["optional-dependencies"][name]:
            inner = line.removeprefix("edgerun[").removesuffix("]")
            lines |= expanded(inner) if line.startswith("edgerun[") else {line.partition(">")[0]}
        return lines

    for name in project["project"]["optional-dependencies"]:
        assert not {"onnxruntime", "onnxruntime-gpu"} <= expanded(name), name
    plain = {line.partition(">")[0] for line in project["project"]["dependencies"]}
    assert not plain & {"onnxruntime", "onnxruntime-gpu", "llama-cpp-python"}


def test_every_dependency_says_why_it_is_there(project: dict[str, Any]) -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for requirement in project["project"]["dependencies"]:
        (line,) = [line for line in lines if line.strip().startswith(f'"{requirement}"')]
        assert "#" in line, f"{requirement}: give the reason as a comment"


def test_installed_metadata_is_that_of_this_checkout() -> None:
    """`make` installs again when the version changes; a stale install would report another."""
    try:
        installed = importlib.metadata.version("edgerun")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("edgerun runs from the folder here, without being installed")
    assert installed == __version__


def test_models_ship_with_the_wheel(project: dict[str, Any]) -> None:
    shared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    # edgerun.paths looks there in an installed edgerun.
    assert shared == {"models": "share/edgerun/models"}
    for name in ("smollm2-135m", "efficientnet-lite0"):
        assert (ROOT / "models" / name / "config.toml").is_file()
