from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.errors import NativeLibraryMissing
from edgerun.native.python_layer import ensure_wheel, install
from tests.native.fakes import WHEEL_NAME, FakeRunner, Recorder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_full_wheel_of_the_users_index_is_taken_and_nothing_is_compiled(tmp_path: Path) -> None:
    runner = FakeRunner(has_full_wheel=True)
    wheel = ensure_wheel(Recorder(), runner=runner, log=tmp_path / "log", wheels=tmp_path / "wheels")
    assert wheel == tmp_path / "wheels" / WHEEL_NAME
    assert wheel.read_bytes() == b"full"
    assert len(runner.commands) == 1


def test_wheel_in_the_cache_is_used_without_running_pip(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL_NAME).write_bytes(b"kept")
    runner = FakeRunner()
    ensure_wheel(Recorder(), runner=runner, log=tmp_path / "log", wheels=tmp_path / "wheels")
    assert runner.commands == []


def test_layer_is_made_without_its_native_part_and_not_from_pips_cache(tmp_path: Path) -> None:
    runner = FakeRunner()
    wheel = ensure_wheel(
        Recorder(),
        runner=runner,
        log=tmp_path / "log",
        wheels=tmp_path / "wheels",
        fetch_sources=lambda folder, **_: folder / "sdist.tar.gz",
    )
    assert wheel.read_bytes() == b"layer"
    assert runner.commands[-1][-1].endswith("sdist.tar.gz")  # by file: pip must not cache it under the name
    assert runner.envs[-1] == {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}


def test_failed_install_shows_the_end_of_pips_log(tmp_path: Path) -> None:
    with pytest.raises(NativeLibraryMissing, match="boom"):
        install(tmp_path, ["cpu", "tui"], Recorder(), FakeRunner(failing="install", has_full_wheel=True))


def test_checkout_is_installed_editable_with_its_extras(tmp_path: Path) -> None:
    runner, report = FakeRunner(has_full_wheel=True), Recorder()
    checkout = tmp_path / "a folder"
    install(checkout, ["cpu", "tui"], report, runner)
    assert runner.commands[-1][-2:] == ["--editable", f"{checkout}[cpu,tui]"]
    assert report.calls[-1] == ("installing edgerun[cpu,tui]", 1, 0)
