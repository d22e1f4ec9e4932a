"""The whole report: every fixture board, files that are broken, and this very machine."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgerun.device.files import SystemFiles
from edgerun.device.probe import ProbeTools, probe, read_device, with_providers
from edgerun.device.report import DeviceReport
from edgerun.device.smoke import ChildOutcome, SmokeCheck
from edgerun.errors import NativeLibraryMissing
from edgerun.native.flavours import NativeFlavour
from tests.device.trees import BOARDS, EXPECTED, FIXTURES, copy_board, make_tree

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"

# What each board should get: (llm, vision), worked out by hand from its CUDA, TensorRT and Python.
CHOICES = {
    "agx-orin-64gb-jp62": ("cuda", TENSORRT),
    "agx-orin-jp72": ("cuda", TENSORRT),
    "agx-thor-jp70": ("cuda", TENSORRT),
    "agx-thor-jp72": ("cuda", TENSORRT),
    "agx-xavier-jp511": ("cpu", CPU),  # CUDA 11.4, TensorRT 8.5, Python 3.8
    "desktop-rtx4090": ("cuda", CUDA),  # no TensorRT on its disk
    "laptop-cpu": ("cpu", CPU),
    "orin-nano-8gb-jp511": ("cpu", CPU),
    "orin-nano-8gb-jp62": ("cuda", TENSORRT),
    "orin-nano-8gb-jp721": ("cuda", TENSORRT),
    "orin-nx-16gb-in-container": ("cuda", TENSORRT),
    "orin-nx-16gb-jp62": ("cuda", TENSORRT),
    "rpi5-8gb": ("cpu", CPU),
    "wsl2-rtx3060": ("cuda", CUDA),
    "xavier-nx-jp511": ("cpu", CPU),
}

EDGE_CASES = {
    "nv_tegra_release.empty": "etc/nv_tegra_release",
    "nv_tegra_release.binary": "etc/nv_tegra_release",
    "nv_tegra_release.short": "etc/nv_tegra_release",
    "nv_tegra_release.two-digit-rev": "etc/nv_tegra_release",
    "nv_tegra_release.future": "etc/nv_tegra_release",
    "compatible.oe4t": "proc/device-tree/compatible",
    "meminfo.page-cache-full": "proc/meminfo",
}


class FakeTools:
    """Stands for children, native libraries and installed packages. outcomes: by provider.

    needs_cuda: the CUDA major that the fake libraries are built for.
    """

    def __init__(
        self,
        tmp_path: Path,
        packages: dict[str, str],
        outcomes: dict[str, ChildOutcome],
        needs_cuda: str | None = None,
    ) -> None:
        self.tried: list[str] = []
        self.asked: list[tuple[str, str | None, str | None]] = []
        self._packages = packages
        self._needs_cuda = needs_cuda
        self._outcomes = outcomes
        self._folder = tmp_path / "native"
        self._folder.mkdir()
        self.tools = ProbeTools(self._run, self._find, lambda: self._packages, tmp_path / "cache.json")

    def _run(self, checks: Sequence[SmokeCheck]) -> list[ChildOutcome]:
        self.tried += [check.provider for check in checks]
        return [self._outcomes.get(check.provider, answer(ok=False, detail="no")) for check in checks]

    def _find(
        self, provider: str, compute_capability: str | None = None, *, cuda_version: str | None = None
    ) -> NativeFlavour:
        self.asked.append((provider, compute_capability, cuda_version))
        is_other_cuda = self._needs_cuda and cuda_version and not cuda_version.startswith(self._needs_cuda)
        if provider not in self._outcomes or is_other_cuda:
            raise NativeLibraryMissing(f"no {provider} libraries, build them", provider=provider)
        return NativeFlavour(provider, self._folder, "fake")


def answer(*, ok: bool = True, detail: str = "ran") -> ChildOutcome:
    return ChildOutcome(0 if ok else 1, json.dumps({"ok": ok, "detail": detail}) + "\n", "")


def test_every_board_has_an_expectation() -> None:
    assert set(BOARDS) == set(EXPECTED) == set(CHOICES)


@pytest.mark.parametrize("board", BOARDS)
def test_board_is_recognised(board: str) -> None:
    report, expected = probe(FIXTURES / board), EXPECTED[board]

    if expected["board"] is not None:
        assert expected["board"] in (report.board or "")
    for key in ("jetpack", "l4t", "cuda", "tensorrt"):
        if expected[key] is not None:
            assert (getattr(report, key) or "").startswith(expected[key]), key
    for key in ("soc", "power_mode"):
        if expected[key] is not None:
            assert getattr(report, key) == expected[key], key
    assert report.memory.unified == expected["unified"]
    assert report.memory.total_bytes == expected["memory_total_kib"] * 1024
    assert [a.kind for a in report.accelerators] == (
        [expected["accelerator"]] * bool(expected["accelerator"])
    )
    if report.accelerators:
        assert report.accelerators[0].compute_capability == expected["compute_capability"]
    if "accelerator_memory_mib" in expected:
        assert report.accelerators[0].memory_total_bytes == expected["accelerator_memory_mib"] << 20


@pytest.mark.parametrize("board", BOARDS)
def test_board_gets_the_provider_it_can_run(board: str) -> None:
    report = probe(FIXTURES / board)
    chosen = tuple(choice.provider for kind in ("llm", "vision") if (choice := report.chosen(kind)))

    assert chosen == CHOICES[board]
    assert all(choice.reason for choice in report.providers)
    assert len(report.providers) == 5  # every rejected one is listed as well


def test_jetson_choice_names_its_tensorrt() -> None:
    choice = probe(FIXTURES / "orin-nano-8gb-jp62").chosen("vision")

    assert choice is not None
    assert choice.reason.startswith("TensorRT 10.3.0 found")


@pytest.mark.parametrize("board", ["xavier-nx-jp511", "agx-xavier-jp511"])
def test_xavier_is_told_that_nothing_newer_comes(board: str) -> None:
    rejected = [c for c in probe(FIXTURES / board).providers if c.is_gpu]

    assert len(rejected) == 3
    for choice in rejected:
        assert "Python 3.8 and CUDA 11.4" in choice.reason
        assert "Xavier no later JetPack" in choice.reason


def test_orin_on_jetpack_5_is_told_to_upgrade() -> None:
    rejected = [c for c in probe(FIXTURES / "orin-nano-8gb-jp511").providers if c.is_gpu]

    assert all("upgrade to JetPack 6.2 or 7.2" in choice.reason for choice in rejected)


def test_machine_without_gpu_says_so_for_each_gpu_provider() -> None:
    reasons = {c.provider: c.reason for c in probe(FIXTURES / "laptop-cpu").providers}

    assert reasons["cuda"] == reasons[TENSORRT] == reasons[CUDA] == "no NVIDIA GPU found"


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("edge_case", EDGE_CASES)
def test_edge_case_files_never_raise(board: str, edge_case: str, tmp_path: Path) -> None:
    root = copy_board(board, tmp_path)
    content = (FIXTURES / "edge-cases" / edge_case).read_bytes()
    make_tree(root, {EDGE_CASES[edge_case]: content})

    json.dumps(probe(root).to_json())


@pytest.mark.parametrize(
    "path",
    [
        *("proc/cpuinfo", "proc/meminfo", "proc/self/cgroup", "proc/device-tree/model"),
        *("usr/local/cuda/version.json", "_cmd/nvidia-smi", "_cmd/nvpmodel-q", "etc/os-release"),
        "_cmd/nvidia-smi--query-gpu=name,driver_version,memory.total,memory.used,utilization.gpu,compute_cap"
        "--format=csv,noheader,nounits",
    ],
)
@pytest.mark.parametrize("content", [b"", bytes(range(256)) * 8, b"[" * 100_000, b"9" * 10_000])
def test_rubbish_in_any_file_never_raises(path: str, content: bytes, tmp_path: Path) -> None:
    root = copy_board("orin-nano-8gb-jp62", tmp_path)
    make_tree(root, {path: content})

    json.dumps(probe(root).to_json())


def test_empty_sysroot_is_a_machine_of_which_nothing_is_known(tmp_path: Path) -> None:
    report = probe(tmp_path)

    assert report.board is report.soc is report.cuda is None
    assert report.memory.total_bytes == 0
    assert any("memory is unknown" in note for note in report.notes)


def test_future_l4t_is_treated_like_the_newest_known(tmp_path: Path) -> None:
    root = copy_board("orin-nano-8gb-jp721", tmp_path)
    make_tree(root, {"etc/nv_tegra_release": (FIXTURES / "edge-cases/nv_tegra_release.future").read_bytes()})
    report = probe(root)

    assert (report.l4t, report.jetpack) == ("41.1.0", None)
    assert any("41.1.0 is newer" in note for note in report.notes)
    assert [c.provider for c in report.providers if c.chosen] == ["cuda", TENSORRT]


def test_community_kernel_is_still_an_orin_nano(tmp_path: Path) -> None:
    root = copy_board("orin-nano-8gb-jp62", tmp_path)
    make_tree(root, {"proc/device-tree/compatible": (FIXTURES / "edge-cases/compatible.oe4t").read_bytes()})
    report = probe(root)

    assert (report.board, report.soc) == ("Jetson Orin Nano", "tegra234")


def test_full_page_cache_is_not_a_full_memory(tmp_path: Path) -> None:
    root = copy_board("agx-thor-jp72", tmp_path)
    make_tree(root, {"proc/meminfo": (FIXTURES / "edge-cases/meminfo.page-cache-full").read_bytes()})

    assert probe(root).memory.available_bytes == 118_000_000 * 1024


def test_container_without_gpu_nodes_is_told_the_docker_option(tmp_path: Path) -> None:
    root = copy_board("orin-nx-16gb-in-container", tmp_path)
    for node in (root / "dev").iterdir():
        node.unlink()
    report = probe(root)

    assert [c.provider for c in report.providers if c.chosen] == ["cpu", CPU]
    assert all("--runtime nvidia" in c.reason for c in report.providers if c.is_gpu)


def test_wsl_whose_cuda_version_is_an_error_goes_by_the_driver(tmp_path: Path) -> None:
    root = copy_board("wsl2-rtx3060", tmp_path)
    make_tree(root, {"_cmd/nvidia-smi": (root / "_cmd/nvidia-smi.cuda-err").read_bytes()})
    report = probe(root)

    assert report.cuda is None
    assert any("ERR!" in note for note in report.notes)
    choice = report.chosen("llm")
    assert choice is not None and choice.provider == "cuda" and "driver 546.80" in choice.reason


def test_json_has_exactly_the_keys_of_the_contract() -> None:
    document = probe(FIXTURES / "desktop-rtx4090").to_json()

    assert list(document) == [
        *("board", "soc", "jetpack", "l4t", "cuda", "tensorrt", "power_mode", "cpu", "memory"),
        *("accelerators", "providers", "notes"),
    ]
    assert isinstance(document["memory"], dict)
    assert set(document["memory"]) == {"total_bytes", "available_bytes", "unified"}
    assert isinstance(document["accelerators"], list) and isinstance(document["accelerators"][0], dict)
    assert set(document["accelerators"][0]) == {
        *("name", "kind", "compute_capability", "memory_total_bytes", "driver"),
    }
    assert isinstance(document["providers"], list) and isinstance(document["providers"][0], dict)
    assert set(document["providers"][0]) == {"kind", "provider", "chosen", "reason"}


LLAMA = {"llama-cpp-python": "0.3.36"}


def probe_as_live(board: str, fake: FakeTools) -> DeviceReport:
    """The report of a fixture board as if edgerun ran on it."""
    report, gpu_blocker = read_device(SystemFiles(FIXTURES / board))
    return with_providers(report, gpu_blocker, fake.tools, smoke=True, use_cache=False)


def test_gpu_board_gets_the_first_provider_that_passed(tmp_path: Path) -> None:
    outcomes = {"cuda": answer(), "cpu": answer(), CUDA: answer(), CPU: answer()}
    fake = FakeTools(tmp_path, {**LLAMA, "onnxruntime-gpu": "1.31.1"}, outcomes)
    report = probe_as_live("orin-nano-8gb-jp62", fake)

    assert [c.provider for c in report.providers if c.chosen] == ["cuda", CUDA]
    assert set(fake.tried) == {"cuda", "cpu", TENSORRT, CUDA, CPU}
    assert ("cuda", "8.7", "12.6") in fake.asked
    assert reason(report, CPU) == "ran, but CUDAExecutionProvider is preferred"
    assert any("believed only after a trial" in note for note in report.notes)


def test_a_trial_overrules_the_expectation(tmp_path: Path) -> None:
    fake = FakeTools(tmp_path, {**LLAMA, "onnxruntime-gpu": "1.18"}, {"cuda": answer(), TENSORRT: answer()})
    report = probe_as_live("xavier-nx-jp511", fake)

    assert [c.provider for c in report.providers if c.chosen] == ["cuda", TENSORRT]
    assert reason(report, CUDA).startswith("no (JetPack 5.1.1 has Python 3.8")


def test_card_whose_driver_runs_newer_cuda_takes_an_older_build(tmp_path: Path) -> None:
    fake = FakeTools(tmp_path, dict(LLAMA), {"cuda": answer()}, needs_cuda="11")
    report = probe_as_live("desktop-rtx4090", fake)

    assert reason(report, "cuda") == "ran"
    assert [a for a in fake.asked if a[0] == "cuda"] == [("cuda", "8.9", "12.8"), ("cuda", "8.9", None)]


def test_clashing_onnxruntimes_keep_the_gpu_from_being_tried(tmp_path: Path) -> None:
    packages = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    fake = FakeTools(tmp_path, packages, {"cuda": answer(), CPU: answer()})
    report = probe_as_live("desktop-rtx4090", fake)

    assert CUDA not in fake.tried
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in reason(report, CUDA)
    assert report.chosen("vision") is not None


def test_this_machine_is_believed_only_after_a_trial(tmp_path: Path) -> None:
    fake = FakeTools(
        tmp_path, {**LLAMA, "onnxruntime": "1.0"}, {"cpu": answer(), CPU: answer(detail="ran here")}
    )
    report = probe(tools=fake.tools)

    assert {"cpu", CPU} <= set(fake.tried)
    assert reason(report, CPU).startswith("ran here")
    assert report.cpu.architecture == platform.machine()
    assert report.cpu.cores_usable >= 1
    assert 0 < report.memory.available_bytes <= report.memory.total_bytes


def test_a_provider_that_fails_its_trial_is_not_chosen(tmp_path: Path) -> None:
    outcomes = {"cpu": answer(), CPU: ChildOutcome(-11, "", "")}
    fake = FakeTools(tmp_path, {**LLAMA, "onnxruntime": "1.0"}, outcomes)
    report = probe(tools=fake.tools)

    vision = [c for c in report.choices("vision") if c.provider == CPU]
    assert not vision[0].chosen and not vision[0].is_usable
    assert "SIGSEGV" in vision[0].reason


def test_missing_native_library_is_the_reason_shown(tmp_path: Path) -> None:
    fake = FakeTools(tmp_path, {**LLAMA, "onnxruntime": "1.0"}, {CPU: answer()})
    report = probe(tools=fake.tools)

    assert reason(report, "cpu") == "no cpu libraries, build them"
    assert "cpu" not in fake.tried


def test_missing_llama_cpp_python_names_the_extra_and_nothing_is_tried(tmp_path: Path) -> None:
    fake = FakeTools(tmp_path, {"onnxruntime": "1.0"}, {CPU: answer()})
    report = probe_as_live("laptop-cpu", fake)

    assert reason(report, "cpu") == "llama-cpp-python is not installed: pip install 'edgerun[cpu]'"
    assert report.chosen("llm") is None


def test_missing_onnxruntime_names_the_extra(tmp_path: Path) -> None:
    fake = FakeTools(tmp_path, {}, {"cpu": answer()})
    report = probe(tools=fake.tools)

    assert "pip install 'edgerun[" in reason(report, CPU)
    assert CPU not in fake.tried


def test_two_onnxruntimes_are_noted(tmp_path: Path) -> None:
    packages = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    fake = FakeTools(tmp_path, packages, {"cpu": answer(), CPU: answer()})
    report = probe(tools=fake.tools)

    assert any("onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1" in note for note in report.notes)


def test_second_probe_uses_what_the_first_one_found(tmp_path: Path) -> None:
    fake = FakeTools(tmp_path, {**LLAMA, "onnxruntime": "1.0"}, {"cpu": answer(), CPU: answer()})
    probe(tools=fake.tools)
    fake.tried.clear()

    assert reason(probe(tools=fake.tools), CPU) == "ran, checked earlier"
    assert CPU not in fake.tried
    probe(tools=fake.tools, use_cache=False)
    assert CPU in fake.tried


def test_without_trials_nothing_is_run(tmp_path: Path) -> None:
    fake = FakeTools(tmp_path, {**LLAMA, "onnxruntime": "1.0"}, {})
    report = probe(smoke=False, tools=fake.tools)

    assert fake.tried == []
    assert report.chosen("vision") is not None


def reason(report: DeviceReport, provider: str) -> str:
    return next(c.reason for c in report.providers if c.provider == provider)
