from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgerun.cli.classify import expand
from tests.cli.conftest import Run
from tests.cli.fake_server import FakeServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "below").mkdir(parents=True)
    for name in ("b.jpg", "a.PNG", "below/c.webp", "notes.txt"):
        (folder / name).write_bytes(b"good")
    return folder


def test_folders_files_and_globs_expand_in_order_each_once(folder: Path) -> None:
    a, b, c, notes = (folder / name for name in ("a.PNG", "b.jpg", "below/c.webp", "notes.txt"))
    assert list(expand([str(folder)])) == [a, b, c]
    assert list(expand([str(b), str(folder)])) == [b, a, c]
    assert list(expand([str(folder / "*.txt"), str(folder / "**" / "*.webp")])) == [notes, c]
    assert list(expand([str(folder / "*")])) == [a, b, c, notes]


def test_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "photo[1].jpg"
    path.write_bytes(b"good")
    assert list(expand([str(path)])) == [path]


def test_json_rows_have_the_shape_of_the_contract(ask: Run, server: FakeServer, folder: Path) -> None:
    result = ask("classify", str(folder / "b.jpg"), "--json", "--top", "2")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [
        {
            "file": str(folder / "b.jpg"),
            "model": "efficientnet-lite0",
            "provider": "FakeProvider",
            "predictions": [
                {"label": "cup", "index": 3, "score": 0.9},
                {"label": "mug", "index": 4, "score": 0.05},
            ],
            "timing_ms": {"preprocess": 1.0, "queue": 0.5, "infer": 2.0, "total": 4.0},
        }
    ]
    assert server.pictures == [{"name": "b.jpg", "model": "efficientnet-lite0", "top_k": "2"}]


def test_a_file_name_that_is_no_utf8_is_read_too(ask: Run, folder: Path) -> None:
    path = folder / os.fsdecode(b"caf\xe9.jpg")
    path.write_bytes(b"good")
    result = ask("classify", str(folder / "caf*"), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)[0]["file"] == str(path)


def test_a_file_without_end_is_an_error(ask: Run) -> None:
    result = ask("classify", "/dev/zero")
    assert result.exit_code == 1
    assert "over 64 MiB" in result.stderr


def test_an_empty_name_is_not_the_current_folder(ask: Run) -> None:
    assert ask("classify", "").exit_code == 2


def test_bad_file_has_its_error_in_its_row_and_the_rest_is_done(ask: Run, folder: Path) -> None:
    (folder / "a.PNG").write_bytes(b"bad")
    absent = str(folder / "absent.jpg")
    result = ask("classify", absent, str(folder), "--json")
    rows = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [Path(row["file"]).name for row in rows] == ["absent.jpg", "a.PNG", "b.jpg", "c.webp"]
    assert "No such file" in rows[0]["error"]
    assert rows[1]["error"] == "these bytes are no picture"
    assert all("error" not in row for row in rows[2:])


def test_folder_without_pictures_is_reported(ask: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = ask("classify", str(tmp_path / "empty"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)[0]["error"] == "there are no pictures in this folder"


def test_text_names_file_labels_time_and_provider(ask: Run, folder: Path) -> None:
    (folder / "a.PNG").write_bytes(b"bad")
    result = ask("classify", str(folder))
    assert result.stdout.splitlines()[:3] == [
        f"{folder}/b.jpg  (4.0 ms, FakeProvider)",
        "   90.0%  cup",
        "    5.0%  mug",
    ]
    assert result.stderr == f"{folder}/a.PNG: error: these bytes are no picture\n"


def test_many_files_keep_their_order(ask: Run, tmp_path: Path) -> None:
    names = [f"{index:02}.jpg" for index in range(30)]
    for name in names:
        (tmp_path / name).write_bytes(b"good")
    rows = json.loads(ask("classify", str(tmp_path / "*.jpg"), "--json").stdout)
    assert [Path(row["file"]).name for row in rows] == names


def test_no_picture_is_a_usage_error(ask: Run) -> None:
    assert ask("classify").exit_code == 2
