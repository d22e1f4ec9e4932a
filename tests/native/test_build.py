from __future__ import annotations

import fcntl
import shutil
import threading
from pathlib import Path

import pytest

from edgerun.errors import NativeLibraryMissing
from edgerun.native.build import BuildTools, announcement, ensure_cpu
from edgerun.native.flavours import NativeFlavour, Place, cpu_cache_dir, find
from edgerun.native.manifest import read_manifest
from tests.native.fakes import FakeRunner, Recorder, fake_fetch_sources, fake_find_tools


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cpu_cache_dir()


def places() -> tuple[Place, ...]:
    return (Place(cpu_cache_dir(), "built on this machine"),)


def build(runner: FakeRunner, report: Recorder | None = None) -> NativeFlavour:
    tools = BuildTools(
        runner=runner,
        check_compiler=lambda: None,
        fetch_sources=fake_fetch_sources,
        find_tools=fake_find_tools,
        amx_off=lambda: ("-DCMAKE_C_FLAGS=-mno-amx-tile",),
    )
    return ensure_cpu(report or Recorder(), places=places(), tools=tools)


def left_behind(cache: Path) -> set[str]:
    return {entry.name for entry in cache.iterdir()} - {".lock", "cpu-build.log"}


def test_result_is_whole_and_can_be_found(cache: Path) -> None:
    flavour = build(FakeRunner())
    assert flavour.path == cache / "cpu"
    assert (flavour.path / "libllama.so").read_bytes() == b"code"
    manifest = read_manifest(flavour.path)
    assert list(manifest.sha256) == ["libllama.so.0"]
    assert manifest.cmake_args[-1] == "-DCMAKE_C_FLAGS=-mno-amx-tile"
    assert find("cpu", places=places()) == flavour
    assert left_behind(cache) == {"cpu"}


def test_second_call_runs_nothing() -> None:
    build(FakeRunner())
    runner, report = FakeRunner(), Recorder()
    build(runner, report)
    assert runner.commands == []
    assert report.calls == []


def test_cost_is_told_before_anything_runs() -> None:
    runner, report = FakeRunner(), Recorder()
    seen_before_first_command: list[str] = []
    runner.during_compile = lambda: seen_before_first_command.extend(report.stages)
    build(runner, report)
    assert "minutes" in report.stages[0]
    assert "once" in report.stages[0]
    assert seen_before_first_command[0] == report.stages[0]
    assert report.calls[-1] == ("compiling llama.cpp", 2, 2)


def test_more_jobs_are_announced_as_less_time() -> None:
    assert "about 3 to 13 minutes" in announcement(1)
    assert "about 1 to 3 minutes" in announcement(4)


@pytest.mark.parametrize("failing", ["-S", "-C"])
def test_failed_step_leaves_nothing_half_made_and_shows_the_log(cache: Path, failing: str) -> None:
    with pytest.raises(NativeLibraryMissing, match="boom"):
        build(FakeRunner(failing=failing))
    assert left_behind(cache) == set()
    assert build(FakeRunner()).path == cache / "cpu"


def test_interrupt_leaves_nothing_half_made(cache: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    runner = FakeRunner()
    runner.during_compile = interrupt
    with pytest.raises(KeyboardInterrupt):
        build(runner)
    assert left_behind(cache) == set()


def test_leftovers_of_a_killed_build_are_cleared(cache: Path) -> None:
    (cache / ".build-killed").mkdir(parents=True)
    build(FakeRunner())
    assert left_behind(cache) == {"cpu"}


def test_damaged_result_is_built_again() -> None:
    flavour = build(FakeRunner())
    (flavour.path / "libllama.so.0").write_bytes(b"cut")
    build(FakeRunner())
    assert (flavour.path / "libllama.so").read_bytes() == b"code"


def test_damaged_folder_that_is_not_ours_is_refused_and_not_rebuilt(tmp_path: Path) -> None:
    made = build(FakeRunner()).path
    theirs = tmp_path / "runtimes" / "cpu"
    shutil.copytree(made, theirs, symlinks=True)
    (theirs / "libllama.so.0").write_bytes(b"cut")
    runner = FakeRunner()
    with pytest.raises(NativeLibraryMissing, match=r"libllama\.so\.0"):
        ensure_cpu(
            Recorder(), places=(Place(theirs.parent, "system package"),), tools=BuildTools(runner=runner)
        )
    assert runner.commands == []


def test_machine_without_a_compiler_hears_it_before_any_download() -> None:
    def no_compiler() -> None:
        raise NativeLibraryMissing("no C++ compiler")

    runner, report = FakeRunner(), Recorder()
    tools = BuildTools(runner=runner, check_compiler=no_compiler)
    with pytest.raises(NativeLibraryMissing, match=r"no C\+\+ compiler"):
        ensure_cpu(report, places=places(), tools=tools)
    assert runner.commands == []
    assert report.calls == []


def test_build_waits_for_one_under_way_and_takes_its_result(cache: Path) -> None:
    made, aside = build(FakeRunner()).path, cache.parent / "aside"
    made.replace(aside)
    waiting, done = threading.Event(), threading.Event()
    second = FakeRunner()
    results: list[NativeFlavour] = []

    def report(stage: str, *_: int) -> None:
        if "waiting" in stage:
            waiting.set()

    def other_process() -> None:
        results.append(ensure_cpu(report, places=places(), tools=BuildTools(runner=second)))
        done.set()

    with (cache / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=other_process)
        thread.start()
        assert waiting.wait(10)
        assert not done.is_set()
        aside.replace(made)  # the build that holds the lock ends: its folder appears whole
    thread.join(10)
    assert done.is_set()
    assert second.commands == []
    assert results[0].path == cache / "cpu"
