"""`edgerun models`: what it prints and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgerun.cli.main import cli
from edgerun.engine.check import CheckedModels, CheckRequest
from edgerun.engine.messages import LlmTuning
from edgerun.repository.repository import default_repository

from ..engine.test_check import START
from ..repository.builders import write_gguf, write_labels, write_onnx


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def run(*arguments: str, code: int = 0, answer: str | None = None) -> Result:
    result = CliRunner().invoke(cli, ["models", *arguments], input=answer)
    assert result.exit_code == code, result.output
    return result


@pytest.mark.usefixtures("home")
def test_list_shows_the_shipped_models() -> None:
    lines = run("list").stdout.splitlines()
    assert any(line.startswith("smollm2-135m\tchat\t1\t98.4 MB\tnot pulled") for line in lines)
    entries = json.loads(run("list", "--json").stdout)
    assert "smollm2-135m" in [entry["name"] for entry in entries]


def test_list_goes_on_beside_a_broken_config(home: Path) -> None:
    folder = home / "extra" / "bad"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('kind = "llm"\nlicence = "MIT"\n')
    result = run("list", "--model-repository", str(home / "extra"))
    assert "smollm2-135m" in result.stdout
    assert "did you mean license?" in result.stderr


def test_add_show_versions_verify_rm(home: Path) -> None:
    write_labels(home / "labels_rgb.txt", 3)
    path = write_onnx(home / "rgb_logits.onnx")
    added = run("add", str(path))
    assert "added rgb_logits" in added.stdout
    assert "labels_rgb.txt" in added.stderr
    shown = json.loads(run("show", "rgb_logits", "--json").stdout)
    assert (shown["name"], shown["is_pulled"]) == ("rgb_logits", True)
    assert shown["file"]["format"].startswith("ONNX")
    assert str(path) in run("show", "rgb_logits").stdout
    assert json.loads(run("versions", "rgb_logits", "--json").stdout)[0]["is_active"] is True
    assert "1 *" in run("versions", "rgb_logits").stdout
    assert "is whole" in run("verify", "rgb_logits").stdout
    assert json.loads(run("rm", "rgb_logits", "--yes", "--json").stdout)["is_forgotten"] is True
    assert path.exists()


def test_show_tells_what_was_measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    root = home / "extra"
    write_gguf(root / "mine" / "1" / "model.gguf")
    extra = ("--model-repository", str(root))
    assert "measured at the first load" in run("show", "mine", *extra).stdout
    assert json.loads(run("show", "mine", "--json", *extra).stdout)["tuning"] is None
    request = CheckRequest(default_repository([root]).resolve("mine"), START)
    tuning = LlmTuning(kv_layout="streams", flash_attention=False, num_threads=2, trials=("one", "two"))
    checked = CheckedModels()
    checked.remember(checked.key(request), request, tuning)
    shown = run("show", "mine", *extra).stdout
    assert "streams, flash attention off, 2 threads (cpu)" in shown
    assert "two" in shown
    assert json.loads(run("show", "mine", "--json", *extra).stdout)["tuning"] == {
        "provider": "cpu",
        "kv_layout": "streams",
        "flash_attention": False,
        "num_threads": 2,
        "trials": ["one", "two"],
    }


@pytest.mark.parametrize(
    ("data", "word"), [(b"", "empty"), (b"<html>no</html>", "HTML page"), (b"GGUF\3\0\0\0", "cut off")]
)
def test_verify_refuses_a_bad_file_in_one_line(home: Path, data: bytes, word: str) -> None:
    path = home / "bad.gguf"
    path.write_bytes(data)
    errors = run("verify", str(path), code=1).stderr.splitlines()
    errors = [line for line in errors if line.startswith("error:")]
    assert len(errors) == 1
    assert word in errors[0]
    assert "bad.gguf" in errors[0]


def test_pull_of_what_is_there_is_quick_and_prints_where(home: Path) -> None:
    path = write_gguf(home / "extra" / "mine" / "1" / "model.gguf")
    document = json.loads(run("pull", "mine", "--json", "--model-repository", str(home / "extra")).stdout)
    assert document == {
        "name": "mine",
        "version": 1,
        "path": str(path),
        "size_bytes": path.stat().st_size,
        "sha256": "",
    }


def test_rollback_goes_back_and_forth(home: Path) -> None:
    for version in (1, 2):
        write_gguf(home / "extra" / "mine" / str(version) / "model.gguf")
    extra = ("--model-repository", str(home / "extra"))
    assert "version 1" in run("rollback", "mine", *extra).stdout
    assert "1 *" in run("versions", "mine", *extra).stdout
    assert json.loads(run("rollback", "mine", "--undo", "--json", *extra).stdout)["version"] == 2
    run("rollback", "mine", "--undo", "--to", "1", *extra, code=2)


@pytest.mark.usefixtures("home")
def test_unknown_names_and_paths_are_one_line() -> None:
    assert "did you mean smollm2-135m" in run("show", "smollm-135m", code=1).stderr
    assert "no model named" in run("pull", "../../etc/passwd", code=1).stderr
    assert "stays" in run("rm", "smollm2-135m", "--yes", code=1).stderr


@pytest.mark.parametrize("command", ["list", "show", "add", "pull", "verify", "rm", "versions", "rollback"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    assert "Example: edgerun models" in run(command, "--help").stdout
