"""Which execution provider each kind of model gets on this device, and why the others do not.

Decides by capability (CUDA version, compute capability, TensorRT version, what a trial said), never by a list
of releases. A trial's word overrules every expectation; expectations decide only where nothing can be tried
(another machine's files) and explain a trial that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgerun.device.files import to_int
from edgerun.device.report import CPU_PROVIDERS, DeviceReport, ProviderChoice
from edgerun.device.smoke import CheckId, SmokeResult
from edgerun.errors import ProviderUnavailable
from edgerun.native.onnx_packages import clash
from edgerun.repository.spec import ModelKind, Requirement

TENSORRT = "TensorrtExecutionProvider"
CUDA = "CUDAExecutionProvider"

# In order of preference.
CANDIDATES: dict[ModelKind, tuple[str, ...]] = {
    "llm": ("cuda", CPU_PROVIDERS["llm"]),
    "vision": (TENSORRT, CUDA, CPU_PROVIDERS["vision"]),
}

MIN_CUDA_MAJOR = 12  # llama.cpp flavours and ONNX Runtime >= 1.20 are built for CUDA 12 and 13
TENSORRT_MAJOR = 10  # ONNX Runtime's provider links libnvinfer.so.10; neither 8 nor 11 loads in its place
# The oldest GPUs that each CUDA release compiles for (its release notes).
_MIN_COMPUTE = {12: (5, 0), 13: (7, 5)}
# The driver that brought each CUDA major release, for when nvidia-smi does not name the CUDA version.
_CUDA_OF_DRIVER = ((580, 13), (525, 12))
_JETPACK_5 = "35."  # L4T


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the choice rests on.

    gpu_blocker: why no GPU provider can work at all, or None. onnxruntimes: installed distributions and their
    versions; None when that cannot be known. has_llama_cpp: whether its Python layer is installed. verdicts:
    what trials said; None when nothing was tried.
    """

    report: DeviceReport
    gpu_blocker: str | None = None
    onnxruntimes: Mapping[str, str] | None = None
    has_llama_cpp: bool = True
    verdicts: Mapping[CheckId, SmokeResult] | None = None


@dataclass(frozen=True, slots=True)
class _Assessment:
    provider: str
    is_usable: bool
    reason: str


def choose(evidence: Evidence) -> tuple[ProviderChoice, ...]:
    """Every candidate with its reason; the first usable one of each kind is chosen."""
    choices: list[ProviderChoice] = []
    for kind, providers in CANDIDATES.items():
        assessments = [_assess(kind, provider, evidence) for provider in providers]
        best = next((a for a in assessments if a.is_usable), None)
        for a in assessments:
            reason = a.reason
            if best is not None and a.is_usable and a is not best:
                worked = a.reason if evidence.verdicts is not None else "should work too"
                reason = f"{worked}, but {best.provider} is preferred"
            choices.append(ProviderChoice(kind, a.provider, a is best, reason, a.is_usable))
    return tuple(choices)


def blocker(kind: ModelKind, provider: str, evidence: Evidence) -> str | None:
    """Why there is no point in trying this provider, or None."""
    is_gpu = provider != CPU_PROVIDERS[kind]
    if is_gpu and evidence.gpu_blocker:
        return evidence.gpu_blocker
    extra = "cuda" if evidence.report.accelerators and not evidence.report.is_tegra else "cpu"
    if kind == "llm" and not evidence.has_llama_cpp:
        return f"llama-cpp-python is not installed: pip install 'edgerun[{extra}]'"
    if kind == "vision" and evidence.onnxruntimes is not None:
        if not evidence.onnxruntimes:
            return f"onnxruntime is not installed: pip install 'edgerun[{extra}]'"
        if is_gpu and len(evidence.onnxruntimes) > 1:
            return clash(evidence.onnxruntimes)
    return None


def require(
    report: DeviceReport, kind: ModelKind, requirement: Requirement, model_name: str
) -> ProviderChoice:
    """The provider a model gets, or ProviderUnavailable; "gpu" never ends on the CPU.

    details of the error: name, require.
    """
    choices = report.choices(kind)
    if requirement == "cpu":
        fit = next((c for c in choices if not c.is_gpu and c.is_usable), None)
    else:
        fit = report.chosen(kind)
        if requirement == "gpu" and fit is not None and not fit.is_gpu:
            fit = None
    if fit is not None:
        return fit
    wanted = [c for c in choices if requirement == "any" or c.is_gpu == (requirement == "gpu")]
    reasons = "; ".join(f"{c.provider}: {c.reason}" for c in wanted)
    asks = {"any": "an execution provider", "gpu": "a GPU", "cpu": "the CPU"}[requirement]
    hint = (
        ' or set require = "any" in its config.toml to let it run on the CPU' if requirement == "gpu" else ""
    )
    raise ProviderUnavailable(
        f"model {model_name} needs {asks} and none works here ({reasons}): "
        f"mend that (`edgerun probe` shows the state){hint}",
        name=model_name,
        require=requirement,
    )


def _assess(kind: ModelKind, provider: str, evidence: Evidence) -> _Assessment:
    blocked = blocker(kind, provider, evidence)
    if blocked:
        return _Assessment(provider, False, blocked)
    report = evidence.report
    expected_problem = None if provider == CPU_PROVIDERS[kind] else _gpu_problem(provider, report)
    if evidence.verdicts is not None:
        verdict = evidence.verdicts.get((kind, provider), SmokeResult(False, "it was not tried"))
        reason = verdict.detail
        if not verdict.is_ok and expected_problem:
            reason = f"{verdict.detail} ({expected_problem})"
        return _Assessment(provider, verdict.is_ok, reason)
    if expected_problem:
        return _Assessment(provider, False, expected_problem)
    if provider == CPU_PROVIDERS[kind]:
        return _Assessment(provider, True, _cpu_reason(report))
    return _Assessment(provider, True, _gpu_reason(provider, report))


def _gpu_problem(provider: str, report: DeviceReport) -> str | None:
    """Why a GPU provider should not work here, going by versions."""
    if not report.accelerators:
        return "no NVIDIA GPU found"
    if (report.l4t or "").startswith(_JETPACK_5):
        return _jetpack_5_problem(report)
    cuda = _cuda_major(report)
    if cuda is None and report.is_tegra:
        return "no CUDA runtime found: sudo apt install nvidia-jetpack"
    if cuda is not None and cuda < MIN_CUDA_MAJOR:
        runs = f"CUDA {report.cuda}" if report.cuda else f"driver {report.accelerators[0].driver}"
        return f"{runs} is too old, edgerun needs CUDA {MIN_CUDA_MAJOR}: update the NVIDIA driver"
    gpu = report.accelerators[0]
    least = _MIN_COMPUTE.get(cuda or MIN_CUDA_MAJOR, _MIN_COMPUTE[13])
    if gpu.compute_capability and _version(gpu.compute_capability) < least:
        return (
            f"CUDA {cuda or MIN_CUDA_MAJOR} has dropped GPUs of compute capability {gpu.compute_capability}"
        )
    if provider != TENSORRT:
        return None
    if report.tensorrt is None:
        return f"no TensorRT (libnvinfer.so.{TENSORRT_MAJOR}) found"
    if _version(report.tensorrt)[0] != TENSORRT_MAJOR:
        advice = ": upgrade to JetPack 6.2 or 7.2" if report.is_tegra else ""
        return f"TensorRT {report.tensorrt} found, ONNX Runtime needs TensorRT {TENSORRT_MAJOR}{advice}"
    return None


def _jetpack_5_problem(report: DeviceReport) -> str:
    has = f"JetPack {report.jetpack or 5} has Python 3.8 and CUDA {report.cuda or '11.4'}"
    needs = f"edgerun's GPU builds need Python 3.10 and CUDA {MIN_CUDA_MAJOR}"
    if report.soc == "tegra194":
        return f"{has}, {needs}, and NVIDIA gives Xavier no later JetPack"
    return f"{has}, {needs}: upgrade to JetPack 6.2 or 7.2"


def _gpu_reason(provider: str, report: DeviceReport) -> str:
    gpu = report.accelerators[0]
    compute = f" (compute capability {gpu.compute_capability})" if gpu.compute_capability else ""
    cuda = f", CUDA {report.cuda}" if report.cuda else f", driver {gpu.driver}" if gpu.driver else ""
    reason = f"{gpu.name}{compute}{cuda}"
    if provider == TENSORRT:
        reason = f"TensorRT {report.tensorrt} found, {reason}"
    if provider == "cuda":
        return reason
    if report.is_tegra:
        # PyPI's aarch64 wheel has code for sm_89, 90, 120 and 121 only: it fails at the first kernel.
        return f"{reason}; needs an onnxruntime-gpu built for Jetson, PyPI's has no code for this GPU"
    if _cuda_major(report) == MIN_CUDA_MAJOR:
        return f"{reason}; needs an onnxruntime-gpu for CUDA 12 (below 1.27)"
    return reason


def _cpu_reason(report: DeviceReport) -> str:
    cpu = report.cpu
    cores = f"{cpu.cores_usable} core{'s' if cpu.cores_usable != 1 else ''}"
    reason = f"{cpu.model or 'CPU'}, {cores}"
    if (report.l4t or "").startswith(_JETPACK_5):
        return f"{reason}; only with a Python 3.10 or newer of your own, JetPack 5 has 3.8"
    return reason


def _cuda_major(report: DeviceReport) -> int | None:
    if report.cuda:
        return _version(report.cuda)[0]
    driver = next((a.driver for a in report.accelerators if a.driver), None)
    major = to_int((driver or "").partition(".")[0])
    if major is None or report.is_tegra:
        return None
    return next((cuda for least, cuda in _CUDA_OF_DRIVER if major >= least), MIN_CUDA_MAJOR - 1)


def _version(text: str) -> tuple[int, ...]:
    return tuple(to_int(part) or 0 for part in text.split("."))
