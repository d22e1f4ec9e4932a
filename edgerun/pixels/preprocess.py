"""Upright RGB pixels to a model's input array, exactly as its PreprocessSpec declares.

Knows no model and no file format. The order is fixed: crop or fit, resize, colour order, normalise, layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgerun.errors import ConfigError, InvalidImage
from edgerun.repository.spec import PreprocessSpec

_RESAMPLING = {
    # Pillow widens the filter when it shrinks: bicubic and bilinear are antialiased, nearest cannot be.
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}
_LETTERBOX_GREY = 114  # YOLOv5, utils/augmentations.py, letterbox()
_FLOAT_DTYPES = ("float32", "float16", "float64")


def preprocess(image: NDArray[np.uint8], spec: PreprocessSpec, dtype: str) -> NDArray[Any]:
    """One input without the batch axis: (3, h, w) for NCHW, (h, w, 3) for NHWC; C-contiguous, of `dtype`.

    image: (H, W, 3) uint8 RGB. mean and std are indexed by channel in the model's colour order.
    With `in_graph` the values stay 0..255, of whatever numeric `dtype` the model declares.
    Raises InvalidImage for another shape, ConfigError when normalised values are to go into an integer input.
    """
    if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise InvalidImage(f"pixels of shape {image.shape}: (height, width, 3) with no empty side is needed")
    if not spec.in_graph and dtype not in _FLOAT_DTYPES:
        raise ConfigError(
            f"the model's input is {dtype} but its config asks for normalised values:"
            " set in_graph = true in [vision.preprocess]"
        )
    pixels = _fit(image, spec)  # (h, w, 3) RGB
    if spec.color == "BGR":
        pixels = pixels[:, :, ::-1]
    values: NDArray[Any] = pixels
    if not spec.in_graph:
        # In float32 whatever the input: float16 would round the difference before the division.
        mean, std = np.asarray(spec.mean, dtype=np.float32), np.asarray(spec.std, dtype=np.float32)
        values = (pixels.astype(np.float32) - mean) / std
    if spec.layout == "NCHW":
        values = values.transpose(2, 0, 1)  # (h, w, 3) -> (3, h, w)
    return np.ascontiguousarray(values, dtype=np.dtype(dtype))


def _fit(image: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    size = (spec.width_px, spec.height_px)
    resampling = _RESAMPLING[spec.interpolation]
    if spec.resize == "crop":
        return _resize(_centre_crop(image, spec), size, resampling)
    if spec.resize == "squash":
        return _resize(image, size, resampling)
    return _letterbox(image, size, resampling)


def _resize(
    image: NDArray[np.uint8], size: tuple[int, int], resampling: Image.Resampling
) -> NDArray[np.uint8]:
    """size: (width, height). An image that has the size already comes back untouched."""
    if (image.shape[1], image.shape[0]) == size:
        return image
    resized = Image.fromarray(np.ascontiguousarray(image)).resize(size, resampling)
    return np.asarray(resized, dtype=np.uint8)


def _centre_crop(image: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    """The centre box of the input's aspect ratio, crop_fraction of the largest that fits, at least 1 pixel.

    For a square input: side = floor(crop_fraction * short side), as in tensorflow/tpu,
    models/official/efficientnet/preprocessing.py, _decode_and_center_crop(); an odd margin is larger at the
    end, as with most pipelines written on Pillow.
    """
    height, width = image.shape[:2]
    if width * spec.height_px <= height * spec.width_px:  # the width limits
        box_width = _share(width, spec.crop_fraction)
        box_height = min(height, max(1, round(box_width * spec.height_px / spec.width_px)))
    else:
        box_height = _share(height, spec.crop_fraction)
        box_width = min(width, max(1, round(box_height * spec.width_px / spec.height_px)))
    top, left = (height - box_height) // 2, (width - box_width) // 2
    return image[top : top + box_height, left : left + box_width]


def _share(side: int, fraction: float) -> int:
    # The small term keeps exact products exact: 0.29 * 100 is 28.999999999999996.
    return min(side, max(1, int(side * fraction + 1e-9)))


def _letterbox(
    image: NDArray[np.uint8], size: tuple[int, int], resampling: Image.Resampling
) -> NDArray[np.uint8]:
    """Fit inside `size` keeping the aspect ratio, centred on grey; an odd margin is larger at the end."""
    width, height = size
    scale = min(width / image.shape[1], height / image.shape[0])
    new_width = min(width, max(1, round(image.shape[1] * scale)))
    new_height = min(height, max(1, round(image.shape[0] * scale)))
    left, top = (width - new_width) // 2, (height - new_height) // 2
    canvas = np.full((height, width, 3), _LETTERBOX_GREY, dtype=np.uint8)
    canvas[top : top + new_height, left : left + new_width] = _resize(
        image, (new_width, new_height), resampling
    )
    return canvas
