from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgerun.errors import NativeLibraryMissing
from edgerun.native.manifest import MANIFEST_NAME, Manifest, hash_libraries, read_manifest, write_manifest

MANIFEST = Manifest(
    flavour="cuda12-sm87",
    provider="cuda",
    llama_cpp_python="0.3.36",
    machine="aarch64",
    cpu_flags=("asimd",),
    compute_capabilities=("8.7",),
    cuda_version="12.6",
    cmake_args=("-DGGML_CUDA=ON",),
    built_at="2026-11-30T21:00:00+00:00",
    sha256={"libllama.so.0": "00"},
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"flavour": "cpu"}', '{"sha256": 3}'])
def test_damaged_manifest_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(NativeLibraryMissing, match=MANIFEST_NAME):
        read_manifest(tmp_path)


@pytest.mark.parametrize("field", ["cpu_flags", "compute_capabilities", "cmake_args", "sha256"])
def test_field_of_another_type_is_refused(tmp_path: Path, field: str) -> None:
    write_manifest(tmp_path, MANIFEST)
    raw = json.loads((tmp_path / MANIFEST_NAME).read_text())
    raw[field] = 5
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(raw))
    with pytest.raises(NativeLibraryMissing):
        read_manifest(tmp_path)


def test_hashes_name_files_and_not_links(tmp_path: Path) -> None:
    (tmp_path / "libllama.so.0").write_bytes(b"")
    (tmp_path / "libllama.so").symlink_to("libllama.so.0")
    # The published SHA-256 of the empty message.
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert hash_libraries(tmp_path) == {"libllama.so.0": empty}
