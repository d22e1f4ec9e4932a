from __future__ import annotations

from dataclasses import replace

import pytest

from edgerun.device.providers import CANDIDATES, CUDA, TENSORRT, Evidence, choose, require
from edgerun.device.report import Accelerator, CpuInfo, DeviceReport, MemoryInfo
from edgerun.device.smoke import SmokeResult
from edgerun.errors import ProviderUnavailable

CPU = "CPUExecutionProvider"
GPU = Accelerator("NVIDIA Test", "discrete", "8.6", 8 << 30, "580.10")
OLD_GPU = replace(GPU, compute_capability="6.1")  # CUDA 13 compiles for 7.5 and newer
REPORT = DeviceReport(
    board=None,
    soc=None,
    jetpack=None,
    l4t=None,
    cuda="13.0",
    tensorrt="10.16.0",
    power_mode=None,
    cpu=CpuInfo("CPU", "x86_64", 4, 8, 4, None, ()),
    memory=MemoryInfo(1, 1, False),
    accelerators=(GPU,),
)
NO_GPU = replace(REPORT, accelerators=(), cuda=None, tensorrt=None)


def chosen(report: DeviceReport) -> tuple[str, ...]:
    return tuple(c.provider for c in choose(Evidence(report)) if c.chosen)


def with_choices(evidence: Evidence) -> DeviceReport:
    return replace(evidence.report, providers=choose(evidence))


def test_candidates_come_in_order_of_preference() -> None:
    assert [c.provider for c in choose(Evidence(REPORT))] == ["cuda", "cpu", TENSORRT, CUDA, CPU]


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (REPORT, ("cuda", TENSORRT)),
        (NO_GPU, ("cpu", CPU)),
        (replace(REPORT, tensorrt="8.6.2"), ("cuda", CUDA)),
        (replace(REPORT, tensorrt="11.0.0"), ("cuda", CUDA)),  # ONNX Runtime links libnvinfer.so.10
        (replace(REPORT, tensorrt=None), ("cuda", CUDA)),
        (replace(REPORT, cuda="11.8"), ("cpu", CPU)),
        (replace(REPORT, cuda=None), ("cuda", TENSORRT)),  # the driver, 580, tells that it is CUDA 13
        (replace(REPORT, cuda=None, accelerators=(replace(GPU, driver="470.82"),)), ("cpu", CPU)),
        (replace(REPORT, accelerators=(OLD_GPU,)), ("cpu", CPU)),
        (
            replace(REPORT, cuda="12.8", accelerators=(replace(GPU, compute_capability="6.1"),)),
            ("cuda", TENSORRT),
        ),
        (replace(REPORT, soc="tegra234", cuda=None), ("cpu", CPU)),  # a Jetson without the CUDA runtime
        (replace(REPORT, soc="tegra999", cuda="14.0"), ("cuda", TENSORRT)),  # newer than known: by capability
    ],
)
def test_choice_follows_capability(report: DeviceReport, expected: tuple[str, ...]) -> None:
    assert chosen(report) == expected


def test_desktop_on_cuda_12_is_told_which_onnxruntime_it_needs() -> None:
    evidence = Evidence(replace(REPORT, cuda="12.8", tensorrt=None))
    choice = next(c for c in choose(evidence) if c.provider == CUDA)

    assert choice.chosen
    assert "below 1.27" in choice.reason


def test_every_choice_has_a_reason_and_one_is_chosen_for_each_kind() -> None:
    for report in (REPORT, NO_GPU):
        choices = choose(Evidence(report))
        assert all(c.reason for c in choices)
        assert [c.kind for c in choices if c.chosen] == list(CANDIDATES)


def test_without_a_verdict_nothing_is_believed() -> None:
    assert not any(c.is_usable for c in choose(Evidence(REPORT, verdicts={})))


def test_failed_trial_is_explained_by_what_was_expected() -> None:
    evidence = Evidence(
        replace(REPORT, tensorrt=None),
        verdicts={("vision", TENSORRT): SmokeResult(False, "libnvinfer missing")},
    )
    reason = next(c.reason for c in choose(evidence) if c.provider == TENSORRT)

    assert reason == "libnvinfer missing (no TensorRT (libnvinfer.so.10) found)"


def test_require_any_gives_the_chosen_one() -> None:
    report = with_choices(Evidence(REPORT))

    assert require(report, "vision", "any", "m").provider == TENSORRT
    assert require(report, "vision", "gpu", "m").provider == TENSORRT
    assert require(report, "vision", "cpu", "m").provider == CPU


def test_require_gpu_never_ends_on_the_cpu() -> None:
    report = with_choices(Evidence(NO_GPU, "the driver is gone"))

    with pytest.raises(ProviderUnavailable) as caught:
        require(report, "vision", "gpu", "detector-x")
    message = caught.value.message
    assert "detector-x" in message
    assert f"{TENSORRT}: the driver is gone" in message and f"{CUDA}: the driver is gone" in message
    assert CPU not in message
    assert "edgerun probe" in message and 'require = "any"' in message
    assert caught.value.details == {"name": "detector-x", "require": "gpu"}


def test_require_names_every_reason_when_nothing_works() -> None:
    report = with_choices(
        Evidence(NO_GPU, "no GPU", verdicts={("llm", "cpu"): SmokeResult(False, "not built")})
    )

    with pytest.raises(ProviderUnavailable, match=r"cuda: no GPU; cpu: not built"):
        require(report, "llm", "any", "m")


def test_require_cpu_fails_where_the_cpu_provider_does() -> None:
    verdicts = {("llm", "cuda"): SmokeResult(True, "ran"), ("llm", "cpu"): SmokeResult(False, "not built")}
    report = with_choices(Evidence(REPORT, verdicts=verdicts))

    assert require(report, "llm", "any", "m").provider == "cuda"
    with pytest.raises(ProviderUnavailable, match="not built"):
        require(report, "llm", "cpu", "m")
