from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.device import jetson
from edgerun.device.jetson import L4t, jetpack_of, read_jetson, read_l4t
from tests.device.trees import FIXTURES, make_tree

ORIN_NANO = ("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nv_tegra_release.empty", None),
        ("nv_tegra_release.binary", None),
        ("nv_tegra_release.short", (36, 4, 3)),
        ("nv_tegra_release.two-digit-rev", (39, 2, 10)),
        ("nv_tegra_release.future", (41, 1, 0)),
    ],
)
def test_release_file_edge_cases(name: str, expected: L4t | None, tmp_path: Path) -> None:
    content = (FIXTURES / "edge-cases" / name).read_bytes()

    assert read_l4t(make_tree(tmp_path, {"etc/nv_tegra_release": content})) == expected


def test_release_without_a_second_number(tmp_path: Path) -> None:
    files = make_tree(tmp_path, {"etc/nv_tegra_release": "# R36 (release), REVISION: 5, GCID: 1\n"})

    assert read_l4t(files) == (36, 5, 0)


def test_package_manager_answers_when_the_release_file_is_missing(tmp_path: Path) -> None:
    command = {"_cmd/dpkg-query-W-nvidia-l4t-core": "nvidia-l4t-core\t36.4.3-20250107174145\n"}
    status = {
        "var/lib/dpkg/status": "Package: bash\nVersion: 5.1\n\n"
        "Package: nvidia-l4t-core\nStatus: install ok installed\nVersion: 35.6.1-20250101\n\n"
    }

    assert read_l4t(make_tree(tmp_path / "a", command)) == (36, 4, 3)
    assert read_l4t(make_tree(tmp_path / "b", status)) == (35, 6, 1)


@pytest.mark.parametrize(
    ("l4t", "jetpack"),
    [
        ((35, 1, 0), "5.0.2"),
        ((35, 6, 2), "5.1.5"),
        ((36, 2, 0), "6.0 DP"),
        ((36, 4, 0), "6.1"),
        ((36, 4, 4), "6.2.1"),
        ((38, 4, 0), "7.1"),
        ((39, 2, 1), "7.2.1"),
    ],
)
def test_known_releases_have_no_note(l4t: L4t, jetpack: str) -> None:
    assert jetpack_of(l4t) == (jetpack, None)


@pytest.mark.parametrize(
    ("l4t", "jetpack"), [((39, 2, 10), "7.2"), ((36, 4, 9), "6.2"), ((36, 9, 0), "6.2"), ((38, 3, 0), "7.0")]
)
def test_unlisted_release_belongs_to_the_family_before_it(l4t: L4t, jetpack: str) -> None:
    found, note = jetpack_of(l4t)

    assert found == jetpack
    assert note is not None and ".".join(map(str, l4t)) in note


@pytest.mark.parametrize("l4t", [(32, 7, 1), (37, 0, 0), (41, 1, 0)])
def test_release_of_an_unknown_major_has_a_note_and_no_jetpack(l4t: L4t) -> None:
    found, note = jetpack_of(l4t)

    assert found is None and note is not None


@pytest.mark.parametrize(
    ("compatible", "board"),
    [
        (("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"), "Jetson AGX Orin"),
        (("nvidia,p3768-0000+p3767-0000", "nvidia,tegra234"), "Jetson Orin NX"),
        (("nvidia,p3768-0000+p3767-0001", "nvidia,tegra234"), "Jetson Orin NX"),
        (("nvidia,p3768-0000+p3767-0004", "nvidia,tegra234"), "Jetson Orin Nano"),
        (ORIN_NANO, "Jetson Orin Nano"),
        (("nvidia,p3509-0000+p3668-0000", "nvidia,tegra194"), "Jetson Xavier NX"),
        (("nvidia,p2972-0000", "nvidia,tegra194"), "Jetson AGX Xavier"),
        (("nvidia,p4071-0000+p3834-0008", "nvidia,tegra264"), "Jetson AGX Thor"),
        (("nvidia,p9999-0000", "nvidia,tegra234"), "Jetson (Orin)"),
        (("nvidia,tegra999",), "Jetson (tegra999)"),
    ],
)
def test_module_number_names_the_board(compatible: tuple[str, ...], board: str, tmp_path: Path) -> None:
    facts = read_jetson(make_tree(tmp_path, {}), compatible, None, 0)

    assert facts is not None
    assert facts.board == board


def test_generic_and_foreign_entries_do_not_name_the_soc() -> None:
    assert jetson.find_soc(("oe4t,tegra999", "nvidia,tegra234", "nvidia,tegra23x")) == "tegra234"
    assert jetson.find_soc(("brcm,bcm2712",)) is None


def test_model_string_of_a_sibling_is_not_believed(tmp_path: Path) -> None:
    model = "NVIDIA Jetson Orin NX Engineering Reference Developer Kit"
    facts = read_jetson(make_tree(tmp_path, {}), ORIN_NANO, model, 7 * GIB)

    assert facts is not None
    assert facts.board == "Jetson Orin Nano"
    assert any("Orin NX" in note for note in facts.notes)


def test_memory_that_contradicts_the_module_is_noted(tmp_path: Path) -> None:
    compatible = ("nvidia,p3768-0000+p3767-0000", "nvidia,tegra234")
    facts = read_jetson(make_tree(tmp_path, {}), compatible, None, int(7.4 * GIB))
    fits = read_jetson(make_tree(tmp_path, {}), compatible, None, 15 * GIB)

    assert facts is not None and any("7.4 GiB" in note for note in facts.notes)
    assert fits is not None and not any("GiB" in note for note in fits.notes)


def test_unknown_soc_is_noted(tmp_path: Path) -> None:
    facts = read_jetson(make_tree(tmp_path, {}), ("nvidia,tegra999",), None, 0)

    assert facts is not None and facts.silicon is None
    assert any("tegra999" in note for note in facts.notes)


def test_cuda_comes_from_version_json_else_from_the_runtime_library(tmp_path: Path) -> None:
    version = '{"cuda": {"name": "CUDA SDK", "version": "12.6.11"}}'
    library = "usr/local/cuda-13.2/targets/sbsa-linux/lib/libcudart.so.13.2.75"

    assert jetson.read_cuda(make_tree(tmp_path / "a", {"usr/local/cuda/version.json": version})) == "12.6"
    assert jetson.read_cuda(make_tree(tmp_path / "b", {library: ""})) == "13.2"
    assert jetson.read_cuda(make_tree(tmp_path / "c", {})) is None


@pytest.mark.parametrize("text", ["", "[]", '{"cuda": 1}', '{"cuda": {"version": null}}', "{", "\x00\xff"])
def test_broken_version_json_is_passed_over(text: str, tmp_path: Path) -> None:
    files = make_tree(
        tmp_path, {"usr/local/cuda/version.json": text, "usr/lib/aarch64-linux-gnu/libcudart.so.11.4.298": ""}
    )

    assert jetson.read_cuda(files) == "11.4"


def test_newest_tensorrt_counts_by_number_and_bare_links_do_not(tmp_path: Path) -> None:
    folder = "usr/lib/aarch64-linux-gnu"
    names = ("libnvinfer.so.10", "libnvinfer.so.8.5.2", "libnvinfer.so.10.3.0", "libnvinfer_plugin.so.11.0.0")
    files = make_tree(tmp_path, {f"{folder}/{name}": "" for name in names})

    assert jetson.read_tensorrt(files) == "10.3.0"
