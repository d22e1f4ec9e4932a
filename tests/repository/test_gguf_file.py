"""gguf_file: whole files are read, damaged ones refused in one line that says what is wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.errors import InvalidModelFile
from edgerun.repository.gguf_file import model_stem, read_gguf
from edgerun.repository.gguf_types import GGML_TYPES

from .builders import gguf_bytes, gguf_string, write_gguf, write_shards

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "general.license": "apache-2.0",
    "general.file_type": 15,
    "llama.context_length": 2048,
    "tokenizer.ggml.tokens": ["a", "b", "ü"],
    "tokenizer.chat_template": "{{ messages }}",
}


def refused(path: Path) -> str:
    with pytest.raises(InvalidModelFile) as caught:
        read_gguf(path)
    message = caught.value.message
    assert "\n" not in message
    assert path.name in message
    return message


def test_header_of_a_whole_file_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata=METADATA, tensors=[("a", (64, 2), 2), ("b", (5,), 0)])
    summary = read_gguf(path)
    assert (summary.architecture, summary.name, summary.license) == ("llama", "tiny", "apache-2.0")
    assert (summary.quantization, summary.context_length) == ("Q4_K_M", 2048)
    assert summary.num_parameters == 64 * 2 + 5
    assert summary.has_chat_template
    assert summary.size_bytes == path.stat().st_size
    assert summary.files == (str(path),)


@pytest.mark.parametrize("cut_bytes", [1, 31, 32, 100])
def test_cut_data_is_refused_with_both_sizes(tmp_path: Path, cut_bytes: int) -> None:
    data = gguf_bytes(tensors=[("a", (64,), 0)])  # 256 bytes, no padding after them
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:-cut_bytes])
    message = refused(path)
    assert str(len(data)) in message
    assert str(len(data) - cut_bytes) in message


def test_every_cut_inside_the_header_is_refused(tmp_path: Path) -> None:
    data = gguf_bytes(metadata=METADATA)
    path = tmp_path / "m.gguf"
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        refused(path)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"<html><body>404 Not Found</body></html>", "HTML page"),
        (b"\n <!DOCTYPE html><title>x</title>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b'{"error": "Repository not found"}', "error message"),
        (b"PK\x03\x04rest", "zip"),
        (b"\0" * 4096, "zero bytes"),
        (b"ggml????", "not a GGUF file"),
    ],
)
def test_foreign_bytes_are_named(tmp_path: Path, data: bytes, word: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert word in refused(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "m.gguf")
    (tmp_path / "d.gguf").mkdir()
    assert "folder" in refused(tmp_path / "d.gguf")


@pytest.mark.parametrize(
    ("version", "word"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")]
)
def test_other_versions_are_refused_with_what_was_found(tmp_path: Path, version: int, word: str) -> None:
    assert word in refused(write_gguf(tmp_path / "m.gguf", version=version))


def test_huge_counts_are_refused_without_reading_on(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    assert "cut off" in refused(path)
    key = gguf_string("k") + struct.pack("<IIQ", 9, 8, 1 << 62)  # an array of 2**62 texts
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    assert "cut off" in refused(path)


def test_unknown_tensor_type_is_refused_by_number(tmp_path: Path) -> None:
    assert "type 999" in refused(write_gguf(tmp_path / "m.gguf", tensors=[("a", (32,), 999)]))


def test_files_without_a_language_model_are_refused(tmp_path: Path) -> None:
    assert "architecture" in refused(write_gguf(tmp_path / "m.gguf", metadata={"a": 1}))
    message = refused(write_gguf(tmp_path / "p.gguf", metadata={"general.architecture": "clip"}))
    assert "mmproj" in message


def test_shard_set_is_one_model(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    summary = read_gguf(paths[0])
    assert summary.files == tuple(str(path) for path in paths)
    assert summary.size_bytes == sum(path.stat().st_size for path in paths)
    assert summary.num_parameters == 3 * 32
    assert model_stem(paths[0]) == "big"


def test_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[1].unlink()
    assert paths[1].name in refused(paths[0])


def test_cut_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-50])
    with pytest.raises(InvalidModelFile, match=paths[2].name):
        read_gguf(paths[0])


def test_later_shard_points_at_the_first(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    assert paths[0].name in refused(paths[1])
    paths[0].unlink()
    assert "missing" in refused(paths[1])


def test_mixed_and_renamed_shards_are_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(paths[0].read_bytes())
    assert "00001-of-00003" in refused(renamed)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(InvalidModelFile, match="mixed"):
        read_gguf(paths[0])


@pytest.mark.parametrize("name", ["mödel 模型 🙂", "it's [bold] a b", "a'b\"c"])
def test_any_path_works(tmp_path: Path, name: str) -> None:
    assert read_gguf(write_gguf(tmp_path / name / f"{name}.gguf")).architecture == "llama"


def test_block_sizes_hold_whole_blocks() -> None:
    """Bits per weight of the published quantisations: an independent check of the table's numbers."""
    published = {
        "Q4_0": 4.5,
        "Q4_1": 5.0,
        "Q8_0": 8.5,
        "Q4_K": 4.5,
        "Q5_K": 5.5,
        "Q6_K": 6.5625,
        "IQ4_XS": 4.25,
    }
    bits = {name: 8 * num_bytes / values for name, values, num_bytes in GGML_TYPES.values()}
    assert {name: bits[name] for name in published} == published


WHOLE = gguf_bytes(metadata=METADATA)


@settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=8),
    size=st.integers(0, len(WHOLE)),
)
def test_damaged_headers_raise_nothing_else(tmp_path: Path, edits: list[tuple[int, int]], size: int) -> None:
    data = bytearray(WHOLE)
    for position, byte in edits:
        data[position] = byte
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:size] if size % 2 else data)
    try:
        read_gguf(path)
    except InvalidModelFile as error:
        assert "\n" not in error.message


@settings(max_examples=100, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_random_bytes_raise_nothing_else(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + data)
    with pytest.raises(InvalidModelFile):
        read_gguf(path)
