"""labels: one name a line, and the right file chosen only when there is no doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.errors import ConfigError
from edgerun.repository.labels import find_labels, read_labels

from .builders import write_labels


def test_lines_become_labels_in_order(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufefftench, Tinca tinca\r\n Gänse \r\nc\n\n".encode())
    assert read_labels(path) == ("tench, Tinca tinca", "Gänse", "c")


@pytest.mark.parametrize(
    ("data", "word"), [(b"a\n\nb\n", "line 2"), (b"\n", "no labels"), (b"\xff\n", "UTF-8")]
)
def test_doubtful_files_are_refused(tmp_path: Path, data: bytes, word: str) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=word):
        read_labels(path)


def test_the_only_fitting_file_is_chosen_and_named(tmp_path: Path) -> None:
    write_labels(tmp_path / "labels_10.txt", 10)
    write_labels(tmp_path / "labels_rgb.txt", 3)
    found = find_labels(tmp_path / "m.onnx", 3)
    assert found.path == tmp_path / "labels_rgb.txt"
    assert "labels_rgb.txt" in found.note


def test_a_file_with_the_models_name_counts(tmp_path: Path) -> None:
    write_labels(tmp_path / "m[1].txt", 4)
    write_labels(tmp_path / "notes.txt", 4)
    assert find_labels(tmp_path / "m[1].onnx", 4).path == tmp_path / "m[1].txt"


def test_two_fitting_files_are_not_guessed_between(tmp_path: Path) -> None:
    write_labels(tmp_path / "labels_a.txt", 3)
    write_labels(tmp_path / "labels_b.txt", 3)
    found = find_labels(tmp_path / "m.onnx", 3)
    assert found.path is None
    assert "labels_a.txt, labels_b.txt" in found.note


def test_wrong_counts_and_unknown_counts_choose_none(tmp_path: Path) -> None:
    write_labels(tmp_path / "labels.txt", 10)
    assert find_labels(tmp_path / "m.onnx", 11).path is None
    assert find_labels(tmp_path / "m.onnx", 0).path is None


@pytest.mark.parametrize("num_classes", [11, 0])
def test_a_model_folders_own_file_is_taken_so_that_loading_compares_the_numbers(
    tmp_path: Path, num_classes: int
) -> None:
    write_labels(tmp_path / "labels.txt", 10)
    (tmp_path / "1").mkdir()
    found = find_labels(tmp_path / "1" / "model.onnx", num_classes, tmp_path)
    assert found.path == tmp_path / "labels.txt"


def test_the_second_place_is_looked_into_last(tmp_path: Path) -> None:
    write_labels(tmp_path / "labels.txt", 3)
    (tmp_path / "1").mkdir()
    assert find_labels(tmp_path / "1" / "model.onnx", 3, tmp_path).path == tmp_path / "labels.txt"
