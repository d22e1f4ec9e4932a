from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.device.files import SystemFiles, to_int
from tests.device.trees import make_tree


def test_missing_and_undecodable_files_do_not_raise(tmp_path: Path) -> None:
    files = make_tree(tmp_path, {"a": b"\xff\xfe ok"})

    assert files.read_text("nowhere/b") is None
    assert "ok" in (files.read_text("a") or "")
    assert files.read_text(".") is None  # a folder


def test_device_tree_strings_are_split_at_nul(tmp_path: Path) -> None:
    files = make_tree(tmp_path, {"compatible": b"nvidia,p1\0nvidia,tegra234\0"})

    assert files.read_strings("compatible") == ("nvidia,p1", "nvidia,tegra234")


def test_absolute_links_stay_inside_the_sysroot(tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = tmp_path / "secret"
    outside.write_text("of the real machine")
    files = make_tree(root, {"etc/alternatives/cuda-12/version.json": "inside"})
    (root / "usr").mkdir()
    (root / "usr/cuda").symlink_to("/etc/alternatives/cuda-12")
    (root / "leak").symlink_to(outside)
    (root / "up").symlink_to("../../secret")

    assert files.read_text("usr/cuda/version.json") == "inside"
    assert files.read_text("leak") is None
    assert files.read_text("up") is None
    assert files.read_text("../secret") is None
    assert files.glob("lea*") == ()


def test_link_loops_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    assert SystemFiles(tmp_path).read_text("a") is None


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["nvidia-smi"], "nvidia-smi"),
        (["nvpmodel", "-q"], "nvpmodel-q"),
        (["getconf", "PAGESIZE"], "getconf-PAGESIZE"),
        (["nvidia-smi", "--query-gpu=name", "--format=csv"], "nvidia-smi--query-gpu=name--format=csv"),
    ],
)
def test_sysroot_commands_are_read_from_their_record(argv: list[str], name: str, tmp_path: Path) -> None:
    output = make_tree(tmp_path, {f"_cmd/{name}": "said\n"}).run(argv)

    assert output is not None
    assert output.text == "said\n"


def test_sysroot_never_runs_a_real_command(tmp_path: Path) -> None:
    assert SystemFiles(tmp_path).run(["uname", "-m"]) is None


def test_real_commands_run_and_absent_ones_give_nothing() -> None:
    output = SystemFiles().run(["uname", "-s"])

    assert output is not None and output.is_ok and output.text == "Linux\n"
    assert SystemFiles().run(["no-such-command-of-edgerun"]) is None


@pytest.mark.parametrize(("text", "value"), [("12\n", 12), ("-1", -1), ("max", None), (None, None)])
def test_to_int_reads_whole_numbers_only(text: str | None, value: int | None) -> None:
    assert to_int(text) == value


def test_to_int_survives_a_number_too_long_to_convert() -> None:
    assert to_int("9" * 10_000 + "x") is None
    assert to_int("²") is None
