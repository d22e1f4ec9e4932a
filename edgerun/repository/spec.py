"""What a model is: the typed form of `config.toml`, and the resolved spec that crosses to the engine.

Owns names, defaults and units of the settings. Does not know how files are found or fetched, nor any
runtime. Field names follow vLLM for language models and Triton for vision models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ModelKind = Literal["llm", "vision"]
Requirement = Literal["any", "gpu", "cpu"]
KvCacheDtype = Literal["f16", "q8_0", "q4_0"]
KvLayout = Literal["auto", "unified", "streams"]
FlashAttention = Literal["auto", "on", "off"]
Layout = Literal["NCHW", "NHWC"]
ColorOrder = Literal["RGB", "BGR"]
ResizeMode = Literal["crop", "squash", "letterbox"]
Interpolation = Literal["bicubic", "bilinear", "nearest"]
OutputKind = Literal["logits", "probabilities"]
VisionTask = Literal["classify", "embed", "raw"]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`[llm.sampling]`: what a request that does not say gets. As a model's generation_config in vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """`[llm]` of config.toml. 0 means: decide from the model and the device."""

    max_model_len: int = 0  # tokens of prompt plus answer; 0: what the model was trained for
    max_num_seqs: int = 16  # sequences that run at once
    # Most tokens of one step, decodes and prompt chunks together. While answers stream the steps are kept
    # shorter than this, by inter_token_target_ms.
    max_num_batched_tokens: int = 512
    inter_token_target_ms: int = 100  # longest wait between two tokens of a running answer that is aimed at
    block_size: int = 16  # tokens of one KV block
    kv_cache_dtype: KvCacheDtype = "f16"
    num_kv_tokens: int = 0  # size of the KV pool in tokens; 0: from memory
    # One pool for all sequences, shared by tag, or a stream of max_model_len cells for each, shared by copy.
    kv_layout: KvLayout = "auto"  # auto: what was measured to be fastest on this device
    flash_attention: FlashAttention = "auto"
    prefix_cache: bool = True
    swap_space_bytes: int = -1  # host memory for preempted sequences; 0: recompute them; -1: from memory
    num_threads: int = 0  # 0: measured, at most the physical cores this process may use
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


@dataclass(frozen=True, slots=True)
class PreprocessSpec:
    """`[vision.preprocess]`: how a picture becomes the input array.

    value = (pixel - mean[c]) / std[c] with pixel in 0..255, unless `in_graph` is set: then the model takes
    the raw uint8 pixels and normalises them itself.
    """

    width_px: int = 224
    height_px: int = 224
    layout: Layout = "NCHW"
    color: ColorOrder = "RGB"
    resize: ResizeMode = "crop"
    crop_fraction: float = 0.875  # for resize = "crop": the centre square is this share of the shorter side
    interpolation: Interpolation = "bicubic"  # always antialiased
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (255.0, 255.0, 255.0)
    in_graph: bool = False


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """`[vision.dynamic_batching]`, Triton's words."""

    preferred_batch_size: int = 1
    max_queue_delay_microseconds: int = 0
    max_queue_size: int = 256


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """`[vision]` of config.toml. Empty strings mean: take what the file declares first."""

    task: VisionTask = "classify"
    input: str = ""
    output: str = ""
    output_kind: OutputKind = "logits"
    embedding_output: str = ""
    labels: str = "labels.txt"
    max_batch_size: int = 8
    top_k: int = 5
    num_threads: int = 0  # 0: decided from the device
    preprocess: PreprocessSpec = field(default_factory=PreprocessSpec)
    dynamic_batching: DynamicBatching = field(default_factory=DynamicBatching)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One version of one model, ready to load: all paths exist and are absolute."""

    name: str
    kind: ModelKind
    version: int
    path: str  # the weights
    sha256: str  # "" where the config names none (a user's own file by reference)
    size_bytes: int
    require: Requirement = "any"
    labels: tuple[str, ...] = ()
    llm: LlmSettings = field(default_factory=LlmSettings)
    vision: VisionSettings = field(default_factory=VisionSettings)
