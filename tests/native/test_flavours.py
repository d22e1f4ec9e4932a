from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgerun.errors import NativeLibraryMissing
from edgerun.native.flavours import Machine, Place, candidates, find, search_places, verify
from edgerun.native.manifest import MANIFEST_NAME, Manifest, hash_libraries, write_manifest

MACHINE = Machine(architecture="aarch64", cpu_flags=frozenset({"asimd", "i8mm"}), llama_cpp_python="0.3.36")
CPU = Manifest(
    flavour="cpu",
    provider="cpu",
    llama_cpp_python="0.3.36",
    machine="aarch64",
    cpu_flags=("asimd",),
    compute_capabilities=(),
    cuda_version=None,
    cmake_args=(),
    built_at="2026-11-30T21:00:00+00:00",
    sha256={},
)
CUDA = replace(
    CPU, flavour="cuda12-sm87", provider="cuda", compute_capabilities=("8.7",), cuda_version="12.6"
)


def lay_out(folder: Path, manifest: Manifest | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "libllama.so").write_bytes(b"code")
    if manifest is not None:
        write_manifest(folder, replace(manifest, sha256=hash_libraries(folder)))
    return folder


def refusal(places: list[Place], provider: str = "cpu", capability: str | None = None, **more: str) -> str:
    with pytest.raises(NativeLibraryMissing) as caught:
        find(provider, capability, places=places, machine=MACHINE, **more)
    return caught.value.message


def test_first_place_that_fits_wins(tmp_path: Path) -> None:
    first = lay_out(tmp_path / "a" / "cpu", CPU)
    lay_out(tmp_path / "b" / "cpu", CPU)
    places = [Place(tmp_path / "a", "here"), Place(tmp_path / "b", "there")]
    found = find("cpu", places=places, machine=MACHINE)
    assert (found.name, found.path, found.origin) == ("cpu", first, "here")


def test_build_of_another_cpu_is_passed_over_with_the_missing_instruction_named(tmp_path: Path) -> None:
    lay_out(tmp_path / "a" / "cpu", replace(CPU, cpu_flags=("asimd", "sve2")))
    good = lay_out(tmp_path / "b" / "cpu", CPU)
    places = [Place(tmp_path / "a", "here"), Place(tmp_path / "b", "there")]
    assert find("cpu", places=places, machine=MACHINE).path == good
    message = refusal(places[:1])
    assert "sve2" in message
    assert "asimd" not in message
    assert "edgerun.native ensure" in message


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (replace(CPU, machine="x86_64"), "was built for x86_64"),
        (replace(CPU, llama_cpp_python="0.3.1"), "belongs to llama-cpp-python 0.3.1"),
    ],
)
def test_other_architecture_or_version_does_not_fit(tmp_path: Path, manifest: Manifest, reason: str) -> None:
    lay_out(tmp_path / "cpu", manifest)
    assert reason in refusal([Place(tmp_path, "here")])


def test_portable_build_runs_on_any_cpu_of_the_architecture(tmp_path: Path) -> None:
    lay_out(tmp_path / "cpu", replace(CPU, cpu_flags=()))
    bare = replace(MACHINE, cpu_flags=frozenset())
    assert find("cpu", places=[Place(tmp_path, "here")], machine=bare).name == "cpu"


def test_gpu_build_is_chosen_by_compute_capability(tmp_path: Path) -> None:
    lay_out(tmp_path / "cuda12-sm72", replace(CUDA, flavour="cuda12-sm72", compute_capabilities=("7.2",)))
    lay_out(tmp_path / "cuda12-sm87", CUDA)
    places = [Place(tmp_path, "here")]
    assert find("cuda", "8.7", places=places, machine=MACHINE).name == "cuda12-sm87"
    message = refusal(places, "cuda", "11.0")
    assert "7.2" in message
    assert "8.7" in message
    assert "CMAKE_CUDA_ARCHITECTURES=110" in message


def test_gpu_build_of_another_cuda_major_version_is_passed_over(tmp_path: Path) -> None:
    lay_out(tmp_path / "cuda12-sm87", CUDA)
    lay_out(tmp_path / "cuda13-sm87", replace(CUDA, flavour="cuda13-sm87", cuda_version="13.0"))
    places = [Place(tmp_path, "here")]
    found = find("cuda", "8.7", cuda_version="13.2", places=places, machine=MACHINE)
    assert found.name == "cuda13-sm87"
    assert "needs CUDA 12" in refusal(places, "cuda", "8.7", cuda_version="11.4")


def test_cpu_request_never_gets_a_gpu_build_nor_the_reverse(tmp_path: Path) -> None:
    lay_out(tmp_path / "gpu" / "cuda12-sm87", CUDA)
    assert "none was found" in refusal([Place(tmp_path / "gpu", "here")], "cpu")
    lay_out(tmp_path / "plain" / "cpu", CPU)
    assert "none was found" in refusal([Place(tmp_path / "plain", "here")], "cuda", "8.7")


def test_folder_without_manifest_counts_only_where_the_user_named_it(tmp_path: Path) -> None:
    lay_out(tmp_path / "mine", None)
    assert "none was found" in refusal([Place(tmp_path / "mine", "x")])
    trusted = [Place(tmp_path / "mine", "EDGERUN_NATIVE_DIR", is_trusted=True)]
    assert find("cpu", places=trusted, machine=MACHINE).path == tmp_path / "mine"
    (tmp_path / "mine" / "libggml-cuda.so").write_bytes(b"")
    assert find("cuda", "8.7", places=trusted, machine=MACHINE).path == tmp_path / "mine"


def test_unreadable_manifest_is_reported_and_not_fatal(tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "a" / "cpu", CPU)
    (folder / MANIFEST_NAME).write_text("{")
    good = lay_out(tmp_path / "b" / "cpu", CPU)
    places = [Place(tmp_path / "a", "here"), Place(tmp_path / "b", "there")]
    assert MANIFEST_NAME in refusal(places[:1])
    assert find("cpu", places=places, machine=MACHINE).path == good


def test_builds_under_way_are_not_seen(tmp_path: Path) -> None:
    lay_out(tmp_path / ".build-1" / "cpu", CPU)
    lay_out(tmp_path / ".finished", CPU)
    assert candidates([Place(tmp_path, "here")], MACHINE) == []


def test_named_folder_is_searched_first_and_the_cache_after_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGERUN_NATIVE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = [place.folder for place in search_places()]
    assert folders[0] == tmp_path
    cache = next(folder for folder in folders if folder.is_relative_to(tmp_path / "cache"))
    assert folders.index(Path("/usr/lib/edgerun/runtimes")) < folders.index(cache)


def test_verify_names_the_file_that_changed(tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "cpu", CPU)
    found = find("cpu", places=[Place(tmp_path, "here")], machine=MACHINE)
    assert verify(found) is None
    (folder / "libllama.so").write_bytes(b"other")
    assert "libllama.so" in (verify(found) or "")
