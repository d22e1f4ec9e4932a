from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgerun.errors import NativeLibraryMissing
from edgerun.native.toolchain import Which, amx_off, find_tools, num_jobs, require_compiler
from tests.native.fakes import FakeRunner, Recorder


def machine_with(*programs: str) -> Which:
    return lambda name: f"/usr/bin/{name}" if name in programs else None


def test_missing_compiler_is_said_with_what_to_install() -> None:
    with pytest.raises(NativeLibraryMissing) as caught:
        require_compiler(machine_with("cc"), {})
    assert "no C++ compiler" in caught.value.message
    assert "no C compiler" not in caught.value.message
    assert "build-essential" in caught.value.message
    assert "gcc-c++" in caught.value.message


def test_compilers_named_in_the_environment_count() -> None:
    require_compiler(machine_with("gcc-13", "g++-13"), {"CC": "gcc-13 -m64", "CXX": "g++-13"})
    with pytest.raises(NativeLibraryMissing, match=r"g\+\+-13"):
        require_compiler(machine_with("cc", "c++"), {"CC": "cc", "CXX": "g++-13"})


def write_program(folder: Path, name: str, output: str) -> Path:
    folder.mkdir()
    script = folder / name
    script.write_text(f"#!/bin/sh\necho '{output}'\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(("version", "is_used"), [("3.25.1", True), ("4.0.0", True), ("3.16.3", False)])
def test_system_cmake_is_used_when_new_enough(tmp_path: Path, version: str, is_used: bool) -> None:
    cmake = str(write_program(tmp_path / "bin", "cmake", f"cmake version {version}"))
    runner = FakeRunner()
    programs = {"cmake": cmake, "ninja": "/usr/bin/ninja"}
    tools = find_tools(tmp_path, runner=runner, log=tmp_path / "log", report=Recorder(), which=programs.get)
    assert (tools.cmake == cmake) is is_used
    assert bool(runner.commands) is not is_used


def test_amx_is_left_out_where_the_compiler_would_use_it_and_the_users_flags_stay(tmp_path: Path) -> None:
    compiler = write_program(tmp_path / "bin", "cc", "#define __AMX_TILE__ 1")
    arguments = amx_off({"CFLAGS": "-g"}, lambda name: str(compiler) if name == "cc" else None)
    assert arguments == (
        "-DCMAKE_C_FLAGS=-g -mno-amx-tile -mno-amx-int8 -mno-amx-bf16",
        "-DCMAKE_CXX_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16",
    )


def test_compiler_or_cpu_without_amx_sees_no_flag_it_may_not_know(tmp_path: Path) -> None:
    compiler = write_program(tmp_path / "bin", "cc", "#define __AVX512F__ 1")
    assert amx_off({}, lambda name: str(compiler)) == ()
    assert amx_off({}, lambda name: None) == ()


def test_tools_from_the_index_stay_out_of_the_users_environment(tmp_path: Path) -> None:
    runner = FakeRunner()
    tools = find_tools(
        tmp_path, runner=runner, log=tmp_path / "log", report=Recorder(), which=lambda name: None
    )
    (command,) = runner.commands
    assert Path(command[command.index("--target") + 1]).is_relative_to(tmp_path)
    assert Path(tools.cmake).is_relative_to(tmp_path)
    assert Path(tools.env["PYTHONPATH"]).is_relative_to(tmp_path)


def test_jobs_are_limited_by_free_memory_and_never_zero(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900000 kB\nMemAvailable: 650000 kB\n")
    assert num_jobs(meminfo) == 1
    meminfo.write_text("MemAvailable: 1000 kB\n")
    assert num_jobs(meminfo) == 1
    assert num_jobs(tmp_path / "absent") == len(os.sched_getaffinity(0))
