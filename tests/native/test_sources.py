from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edgerun.errors import NativeLibraryMissing
from edgerun.native.sources import fetch_sdist, unpack_llama_cpp
from tests.native.fakes import SDIST_NAME, FakeRunner, Recorder, write_sdist


def test_only_what_the_library_needs_is_unpacked(tmp_path: Path) -> None:
    members = {
        "CMakeLists.txt": "x",
        "src/llama.cpp": "code",
        "models/a.gguf": "big",
        ".git": "x",
        "tests/t.cpp": "x",
    }
    sdist = write_sdist(tmp_path / SDIST_NAME, members)
    source = unpack_llama_cpp(sdist, tmp_path / "source")
    unpacked = {file.relative_to(source).as_posix() for file in source.rglob("*") if file.is_file()}
    assert unpacked == {"CMakeLists.txt", "src/llama.cpp"}


def test_member_that_climbs_out_is_not_unpacked(tmp_path: Path) -> None:
    members = {"CMakeLists.txt": "x", "src/../../../../../evil": "x"}
    unpack_llama_cpp(write_sdist(tmp_path / SDIST_NAME, members), tmp_path / "a" / "b" / "c" / "source")
    assert not list(tmp_path.rglob("evil"))


def test_archive_without_llama_cpp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NativeLibraryMissing, match="holds no"):
        unpack_llama_cpp(write_sdist(tmp_path / SDIST_NAME, {"README": "x"}), tmp_path / "source")


def test_file_with_another_hash_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(NativeLibraryMissing, match="sha256"):
        fetch_sdist(tmp_path, runner=FakeRunner(), log=tmp_path / "log", report=Recorder(), sha256="00")
    assert list(tmp_path.iterdir()) == []


def test_sdist_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path / SDIST_NAME)
    runner = FakeRunner()
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    assert (
        fetch_sdist(tmp_path, runner=runner, log=tmp_path / "log", report=Recorder(), sha256=digest) == sdist
    )
    assert runner.commands == []


def test_settings_of_the_user_cannot_turn_the_download_into_a_build(tmp_path: Path) -> None:
    runner = FakeRunner()
    with pytest.raises(NativeLibraryMissing):
        fetch_sdist(tmp_path, runner=runner, log=tmp_path / "log", report=Recorder(), sha256="00")
    assert runner.envs == [{"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}]
    assert not any("index" in word for word in runner.commands[0])
