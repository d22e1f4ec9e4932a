"""From a model on the disk to the spec that an engine loads, and the words about it that people read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgerun.errors import ConfigError, EdgerunError, InvalidModelFile, ModelNotFound, ModelNotPulled
from edgerun.repository import versions
from edgerun.repository.catalog import Inspector, Model
from edgerun.repository.config_file import CONFIG_NAME, FileSource, ModelConfig
from edgerun.repository.files import human_size
from edgerun.repository.gguf_file import GgufSummary, shards
from edgerun.repository.inspection import PATH_SUFFIXES, Summary
from edgerun.repository.labels import read_labels
from edgerun.repository.sources import describe_source
from edgerun.repository.spec import ModelSpec


def as_path(text: str) -> Path | None:
    """`text` as the path of a bare model file; None where it is a model's name.

    Only the suffix makes it a path: a name never becomes a path by what lies on the disk.
    """
    return Path(text).expanduser() if text.lower().endswith(PATH_SUFFIXES) else None


def build_spec(
    inspect: Inspector,
    model_name: str,
    config: ModelConfig,
    version: int,
    weights: Path,
    label_folders: Sequence[Path] = (),
    sha256: str = "",
) -> ModelSpec:
    """Raises InvalidModelFile for a file that is not whole, ConfigError for labels that are not there."""
    try:
        summary = inspect(weights)
        labels = _labels(config, label_folders)
    except EdgerunError as error:
        error.details.setdefault("name", model_name)
        raise
    return ModelSpec(
        name=model_name,
        kind=config.kind,
        version=version,
        path=str(weights),
        sha256=sha256,
        size_bytes=summary.size_bytes,
        require=config.require,
        labels=labels,
        llm=config.llm,
        vision=config.vision,
    )


def spec_of_model(inspect: Inspector, model: Model, version: int, weights: Path) -> ModelSpec:
    """As build_spec; also the file's size must be what the config says."""
    if is_stump(model, version, weights):
        declared = model.declared(version).size_bytes
        raise InvalidModelFile(
            f"{weights} has {weights.stat().st_size} bytes, {model.folder / CONFIG_NAME} says {declared}; "
            f"run `edgerun models pull {model.name}`",
            name=model.name,
            path=str(weights),
        )
    places = (weights.parent, model.folder / str(version), model.folder)
    sha256 = model.declared(version).sha256
    return build_spec(inspect, model.name, model.config, version, weights, places, sha256)


def is_stump(model: Model, version: int, weights: Path) -> bool:
    """Whether the file has not the size that the config declares."""
    declared = model.declared(version).size_bytes
    return declared > 0 and weights.stat().st_size != declared


def known_versions(model: Model) -> list[int]:
    """Declared or on this machine, newest first."""
    return sorted({*model.present(), *(entry.version for entry in model.config.versions)}, reverse=True)


def active_version(model: Model) -> int:
    """The version that is served; 0: none is on this machine."""
    pinned = versions.read_state(model.store_folder).pinned
    return versions.active(model.config.version_policy, model.present(), pinned)


def check_served(model: Model, version: int) -> int:
    """`version`, if it is the active one or one that the policy serves. Raises ModelNotFound."""
    known = known_versions(model)
    if version not in known:
        raise ModelNotFound(
            f"{model.name} has no version {version}; there is: {shown(known)}",
            name=model.name,
            version=version,
        )
    served = versions.allowed(model.config.version_policy, model.present() or known)
    if version not in (active_version(model), *served):
        raise ModelNotFound(
            f"version {version} of {model.name} is not served by its version_policy; change it in "
            f"{model.folder / CONFIG_NAME}",
            name=model.name,
            version=version,
        )
    return version


def not_pulled(model: Model, version: int) -> ModelNotPulled:
    """Says what to do to have the weights of a version (0: the one that the policy serves)."""
    declared = [entry.version for entry in model.config.versions]
    wanted = version or next(iter(versions.allowed(model.config.version_policy, declared)), 0)
    gone = model.references(wanted)
    if gone:
        return ModelNotPulled(
            f"the file of {model.name} is gone: {gone[0]}; bring it back, or run "
            f"`edgerun models rm {model.name}`",
            name=model.name,
        )
    what = f"version {version} of {model.name}" if version else model.name
    if not any(entry.sources for entry in model.config.versions):
        return ModelNotPulled(
            f"{what} has no weights on this machine and its config names no source; put the file at "
            f"{model.target(wanted or 1)}",
            name=model.name,
        )
    size = size_of(model, wanted)
    return ModelNotPulled(
        f"{what} is not on this machine yet: run `edgerun models pull {model.name}`"
        + (f" ({human_size(size)})" if size else ""),
        name=model.name,
    )


def shown(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"


def size_of(model: Model, version: int) -> int:
    """Bytes on the disk, else as declared; 0: unknown."""
    weights = model.weights(version) if version else None
    if weights is None:
        return model.declared(version).size_bytes
    return sum(part.stat().st_size for part in shards(weights))


def source_words(model: Model, version: int) -> str:
    """Where a version comes from, for lists."""
    sources = model.declared(version).sources
    if sources:
        return "; ".join(describe_source(source) for source in sources)
    return f"beside its config in {model.folder}" if model.weights(version) else ""


def refers_to(model: Model, config: ModelConfig) -> bool:
    """Whether both take their weights from the same file of the user's."""
    mine = [source for version in model.config.versions for source in version.sources]
    return any(
        isinstance(source, FileSource) and source in mine
        for version in config.versions
        for source in version.sources
    )


def summary_details(summary: Summary) -> tuple[tuple[str, str], ...]:
    """What a file's header says, as (word, value) for people."""
    if isinstance(summary, GgufSummary):
        return (
            ("format", f"GGUF {summary.version}"),
            ("architecture", summary.architecture),
            ("quantization", summary.quantization or "unknown"),
            ("parameters", str(summary.num_parameters)),
            ("context_length", str(summary.context_length or "unknown")),
            ("chat_template", "yes" if summary.has_chat_template else "no"),
            ("files", str(len(summary.files))),
        )

    def show(tensors: Sequence[object]) -> str:
        return "; ".join(str(tensor) for tensor in tensors)

    return (
        ("format", f"ONNX, IR version {summary.ir_version}, opset {summary.opset_version}"),
        ("producer", summary.producer or "unknown"),
        ("inputs", show(summary.inputs)),
        ("outputs", show(summary.outputs)),
        ("files", str(1 + len(summary.data_files))),
    )


def _labels(config: ModelConfig, folders: Sequence[Path]) -> tuple[str, ...]:
    """The names of a vision model's classes; () where the config says that there are none (labels = "")."""
    if config.kind != "vision" or not config.vision.labels:
        return ()
    wanted = Path(config.vision.labels).expanduser()
    candidates = [wanted] if wanted.is_absolute() else [folder / wanted for folder in folders]
    found = next((path for path in candidates if path.is_file()), None)
    if found is not None:
        return read_labels(found)
    if config.vision.task != "classify":
        return ()
    where = f"in {folders[-1]}" if folders else "there"
    raise ConfigError(
        f"the labels file {config.vision.labels} is not {where}; put it there, or set "
        'labels = "" under [vision]',
        key="vision.labels",
    )
