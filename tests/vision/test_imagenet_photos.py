"""The shipped classifier on 20 real photos: right labels, and agreement with a pipeline written apart.

The photos are those of the foolbox wheel (MIT): `imagenet_NN_LABEL.jpg`, LABEL being the ImageNet class. They
are fetched by pip with its own index settings, kept in the cache, and never part of this repository.
"""

from __future__ import annotations

import io
import queue
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from edgerun import paths
from edgerun.engine.messages import Infer, Inferred
from edgerun.pixels.image import decode_image
from edgerun.pixels.postprocess import scores, top_k
from edgerun.pixels.preprocess import preprocess
from edgerun.repository.spec import ModelSpec, PreprocessSpec, VisionSettings
from edgerun.vision.worker import VisionWorker

pytestmark = pytest.mark.native

MODEL = "efficientnet-lite0"
PHOTO_NAME = re.compile(r"foolbox/data/imagenet_\d+_(\d+)\.jpg")
SETTINGS = VisionSettings(
    output="logits",
    embedding_output="embedding",
    preprocess=PreprocessSpec(layout="NHWC", in_graph=True),
)


class Photo(NamedTuple):
    data: bytes
    label: int


class Answer(NamedTuple):
    top: int
    scores: np.ndarray
    embedding: np.ndarray


@pytest.fixture(scope="module")
def photos() -> list[Photo]:
    folder = paths.cache_dir() / "test-data"
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("foolbox-3.3.4-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*command, "foolbox==3.3.4"], check=True, timeout=300)
    (wheel,) = folder.glob("foolbox-3.3.4-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = [(name, PHOTO_NAME.fullmatch(name)) for name in sorted(archive.namelist())]
        return [Photo(archive.read(name), int(match[1])) for name, match in found if match]


@pytest.fixture(scope="module")
def model_path() -> str:
    folder = paths.shipped_models_dir()
    assert folder is not None, "the models that ship with edgerun are not installed"
    return str(folder / MODEL / "1" / "model.onnx")


@pytest.fixture(scope="module")
def answers(photos: list[Photo], model_path: str) -> list[Answer]:
    replies: queue.Queue[Any] = queue.Queue()
    labels = (Path(model_path).parent.parent / "labels.txt").read_text(encoding="utf-8").splitlines()
    spec = ModelSpec(
        name=MODEL,
        kind="vision",
        version=1,
        path=model_path,
        sha256="",
        size_bytes=0,
        labels=tuple(labels),
        vision=SETTINGS,
    )
    worker = VisionWorker(spec, "CPUExecutionProvider", "test", 0, replies.put)
    started_s = time.perf_counter()
    try:
        for number, photo in enumerate(photos):
            pixels = preprocess(decode_image(photo.data), SETTINGS.preprocess, worker.info.input_dtype)
            worker.submit(
                Infer(
                    request_id=number,
                    model=MODEL,
                    data=pixels.tobytes(),
                    shape=pixels.shape,
                    dtype=pixels.dtype.name,
                )
            )
        found = {reply.request_id: reply for reply in (replies.get(timeout=60) for _ in photos)}
    finally:
        worker.close()
    rate = len(photos) / (time.perf_counter() - started_s)
    print(f"\n{rate:.0f} pictures/s, decoded, prepared and classified; {worker.stats()}")
    return [_answer(found[number]) for number in range(len(photos))]


def _answer(reply: Any) -> Answer:
    assert isinstance(reply, Inferred), reply
    logits, embedding = (np.frombuffer(out.data, out.dtype).reshape(out.shape) for out in reply.outputs)
    result = scores(logits, "logits")
    return Answer(top_k(result, (), 1)[0].index, result, embedding)


def reference(data: bytes, session: Any) -> np.ndarray:
    """Softmax scores by Pillow and ONNX Runtime alone, as the model's authors describe the preparation."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    side = int(0.875 * min(image.size))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    small = image.crop((left, top, left + side, top + side)).resize((224, 224), Image.Resampling.BICUBIC)
    logits = session.run(["logits"], {session.get_inputs()[0].name: np.asarray(small)[None]})[0][0]
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


def test_at_least_17_of_20_photos_get_their_label(photos: list[Photo], answers: list[Answer]) -> None:
    assert len(photos) == 20
    right = sum(answer.top == photo.label for photo, answer in zip(photos, answers, strict=True))
    assert right >= 17, f"{right} of 20 right"


def test_at_least_19_of_20_photos_agree_with_the_reference(
    photos: list[Photo], answers: list[Answer], model_path: str
) -> None:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(model_path, providers=["CPUExecutionProvider"])
    expected = [reference(photo.data, session) for photo in photos]
    agreeing = sum(int(e.argmax()) == a.top for e, a in zip(expected, answers, strict=True))
    assert agreeing >= 19, f"{agreeing} of 20 agree"
    # Batched and alone differ in the order of float32 sums only.
    for one, answer in zip(expected, answers, strict=True):
        np.testing.assert_allclose(answer.scores, one, atol=1e-3)


def test_embedding_of_a_photo_is_nearest_to_its_own_flipped_crop(
    photos: list[Photo], answers: list[Answer], model_path: str
) -> None:
    """Every photo finds itself among the 20 by the cosine of embeddings."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(model_path, providers=["CPUExecutionProvider"])
    known = np.stack([answer.embedding for answer in answers])
    known /= np.linalg.norm(known, axis=1, keepdims=True)
    for number, photo in enumerate(photos):
        flipped = np.ascontiguousarray(decode_image(photo.data)[40:, ::-1])
        pixels = preprocess(flipped, SETTINGS.preprocess, "uint8")
        asked = session.run(["embedding"], {session.get_inputs()[0].name: pixels[None]})[0][0]
        assert int((known @ asked).argmax()) == number
