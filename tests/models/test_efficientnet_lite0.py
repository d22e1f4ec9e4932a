"""The shipped classifier: the file is the one its config names, and it does what the config says."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "efficientnet-lite0"
WEIGHTS = MODEL / "1" / "model.onnx"
SCRIPTS = ROOT / "packaging" / "models"
SAMPLES = ROOT / "edgerun" / "cli" / "samples"
MAX_COMMITTED_BYTES = 20_000_000

Session = Any  # onnxruntime ships no usable type for InferenceSession


@pytest.fixture(scope="module")
def graph() -> onnx.GraphProto:
    return onnx.load(str(WEIGHTS)).graph


@pytest.fixture(scope="module")
def session() -> Session:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(WEIGHTS), options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def labels() -> list[str]:
    return (MODEL / "labels.txt").read_text(encoding="utf-8").splitlines()


def pixels_of(photo: Path) -> NDArray[np.uint8]:
    """Centre square of 0.875 of the shorter side, antialiased bicubic: what config.toml asks for."""
    with Image.open(photo) as opened:
        image = opened.convert("RGB")
    side = round(min(image.size) * 0.875)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((224, 224), Image.Resampling.BICUBIC))


def three_pictures() -> NDArray[np.uint8]:
    noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    return np.stack([pixels_of(SAMPLES / "coffee.jpg"), pixels_of(SAMPLES / "chelsea.jpg"), noise])


def run_script(name: str, output: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPTS / name), "--output", str(output)], check=True)


def test_the_config_names_the_committed_bytes() -> None:
    data = WEIGHTS.read_bytes()
    (version,) = tomllib.loads((MODEL / "config.toml").read_text(encoding="utf-8"))["versions"]

    assert (version["file"], version["version"]) == (WEIGHTS.name, 1)
    assert version["size_bytes"] == len(data) < MAX_COMMITTED_BYTES
    assert version["sha256"] == hashlib.sha256(data).hexdigest()


def test_the_model_passes_the_onnx_checker_and_stays_readable_by_old_runtimes() -> None:
    model = onnx.load(str(WEIGHTS))
    onnx.checker.check_model(model, full_check=True)

    # ONNX Runtime 1.20 and the parser of TensorRT 10.3 take these.
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]
    assert model.ir_version <= 9


def test_cast_comes_before_transpose(graph: onnx.GraphProto) -> None:
    """TensorRT's parser takes a uint8 input into a Cast and into nothing else."""
    (cast,) = [node for node in graph.node if "image" in node.input]
    (transpose,) = [node for node in graph.node if node.op_type == "Transpose"]

    assert cast.op_type == "Cast"
    assert list(transpose.input) == list(cast.output)


def test_the_tensors_are_those_of_the_config(session: Session) -> None:
    vision = tomllib.loads((MODEL / "config.toml").read_text(encoding="utf-8"))["vision"]
    (image,) = session.get_inputs()
    logits, embedding = session.get_outputs()
    side = [vision["preprocess"]["height_px"], vision["preprocess"]["width_px"], 3]

    assert (image.name, image.type, image.shape) == (vision["input"], "tensor(uint8)", ["batch", *side])
    assert (logits.name, logits.shape) == (vision["output"], ["batch", 1000])
    assert (embedding.name, embedding.shape) == (vision["embedding_output"], ["batch", 1280])


def test_a_batch_gives_what_each_picture_gives_alone(session: Session) -> None:
    pictures = three_pictures()
    logits, embedding = session.run(["logits", "embedding"], {"image": pictures})
    alone = [session.run(["logits", "embedding"], {"image": picture[None]}) for picture in pictures]

    # Logits span about -5..15; kernels may sum in another order for another batch: a few float32 ulps.
    np.testing.assert_allclose(logits, np.concatenate([one[0] for one in alone]), atol=1e-3, rtol=0)
    np.testing.assert_allclose(embedding, np.concatenate([one[1] for one in alone]), atol=1e-5, rtol=0)
    assert not np.allclose(logits[0], logits[1], atol=1.0)  # three different pictures, three answers


def test_every_embedding_has_length_one(session: Session) -> None:
    (embedding,) = session.run(["embedding"], {"image": three_pictures()})

    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), 1.0, atol=1e-5)


def test_the_labels_are_1000_different_names_in_imagenet_order(labels: list[str]) -> None:
    assert len(labels) == 1000
    assert len({label.lower() for label in labels}) == 1000
    assert all(label and label == label.strip() for label in labels)
    known = {0: "tench", 207: "golden retriever", 281: "tabby", 967: "espresso", 999: "toilet tissue"}
    assert {index: labels[index] for index in known} == known


def test_the_coffee_photo_is_an_espresso_beyond_doubt(session: Session, labels: list[str]) -> None:
    (logits,) = session.run(["logits"], {"image": pixels_of(SAMPLES / "coffee.jpg")[None]})
    shares = np.exp(logits[0] - logits[0].max())
    shares /= shares.sum()

    assert labels[int(shares.argmax())] == "espresso"
    assert shares.max() > 0.9  # 0.95 measured with PyTorch on the original PNG


@pytest.mark.native
@pytest.mark.slow
def test_the_script_rebuilds_the_committed_bytes(tmp_path: Path) -> None:
    run_script("build_efficientnet_lite0.py", tmp_path / "model.onnx")

    assert (tmp_path / "model.onnx").read_bytes() == WEIGHTS.read_bytes()


@pytest.mark.native
@pytest.mark.slow
def test_the_script_rebuilds_the_labels(tmp_path: Path) -> None:
    run_script("build_imagenet_labels.py", tmp_path / "labels.txt")

    assert (tmp_path / "labels.txt").read_bytes() == (MODEL / "labels.txt").read_bytes()


@pytest.mark.native
@pytest.mark.slow
def test_at_least_17_of_20_labelled_photos_are_right() -> None:
    command = [sys.executable, str(SCRIPTS / "evaluate_photos.py")]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert line.startswith("top-1 ")
    assert int(line.split()[1].removesuffix("/20")) >= 17  # PyTorch gets 18
