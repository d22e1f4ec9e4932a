"""preprocess against values computed by hand, and against a pipeline written apart with Pillow and numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from edgerun.errors import ConfigError, InvalidImage
from edgerun.pixels.preprocess import preprocess
from edgerun.repository.spec import PreprocessSpec

RAW = PreprocessSpec(width_px=4, height_px=4, crop_fraction=1.0, layout="NHWC", in_graph=True)


def noise(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * 7919 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def solid(colour: tuple[int, int, int], height: int = 10, width: int = 10) -> NDArray[np.uint8]:
    return np.full((height, width, 3), colour, dtype=np.uint8)


@pytest.mark.parametrize("size", [(512, 512), (480, 641), (333, 200), (100, 90), (1, 2000), (1, 1)])
def test_efficientnet_lite0_equals_the_reference(size: tuple[int, int]) -> None:
    image = noise(*size)
    spec = PreprocessSpec(mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0))

    side = max(1, int(0.875 * min(size)))
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    crop = Image.fromarray(image).crop((left, top, left + side, top + side))
    small = np.asarray(crop.resize((224, 224), Image.Resampling.BICUBIC), dtype=np.float32)
    expected = ((small - 127.0) / 128.0).transpose(2, 0, 1)

    np.testing.assert_array_equal(preprocess(image, spec, "float32"), expected)


def test_normalising_in_the_graph_gives_the_same_numbers() -> None:
    image = noise(300, 400)
    outside = PreprocessSpec(layout="NHWC", mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0))
    inside = preprocess(image, replace(outside, in_graph=True), "uint8")
    assert inside.dtype == np.uint8
    np.testing.assert_array_equal(
        (inside.astype(np.float32) - 127) / 128, preprocess(image, outside, "float32")
    )


def test_mean_and_std_by_hand() -> None:
    spec = PreprocessSpec(width_px=2, height_px=2, mean=(10.0, 20.0, 30.0), std=(2.0, 4.0, 5.0))
    values = preprocess(solid((110, 60, 80)), spec, "float32")
    np.testing.assert_array_equal(values[:, 0, 0], [50.0, 10.0, 10.0])


def test_mean_follows_the_models_colour_order() -> None:
    spec = PreprocessSpec(width_px=2, height_px=2, color="BGR", mean=(1.0, 2.0, 3.0), std=(1.0, 1.0, 1.0))
    values = preprocess(solid((110, 60, 80)), spec, "float32")
    np.testing.assert_array_equal(values[:, 0, 0], [79.0, 58.0, 107.0])  # blue - 1, green - 2, red - 3


@pytest.mark.parametrize(("layout", "shape"), [("NCHW", (3, 5, 7)), ("NHWC", (5, 7, 3))])
def test_layout_and_dtype_are_those_declared(layout: Any, shape: tuple[int, ...]) -> None:
    spec = PreprocessSpec(width_px=7, height_px=5, layout=layout)
    for dtype in ("float32", "float16"):
        values = preprocess(noise(50, 60), spec, dtype)
        assert (values.shape, values.dtype.name) == (shape, dtype)
        assert values.flags.c_contiguous


def test_float16_is_rounded_only_at_the_end() -> None:
    spec = PreprocessSpec(
        width_px=4, height_px=4, mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375)
    )
    exact = preprocess(noise(9, 9), spec, "float32")
    np.testing.assert_array_equal(preprocess(noise(9, 9), spec, "float16"), exact.astype(np.float16))


def test_in_graph_pixels_stay_0_to_255_in_a_float_input() -> None:
    values = preprocess(solid((200, 100, 50)), RAW, "float32")
    np.testing.assert_array_equal(values[0, 0], [200.0, 100.0, 50.0])


def test_normalised_values_for_an_integer_input_are_refused() -> None:
    with pytest.raises(ConfigError, match="in_graph = true"):
        preprocess(solid((1, 2, 3)), PreprocessSpec(), "uint8")


def test_crop_takes_the_centre() -> None:
    image = solid((0, 0, 0), 20, 40)
    image[6:14, 16:24] = (255, 255, 255)  # the centre square of 0.4 * 20 = 8 pixels
    spec = replace(RAW, crop_fraction=0.4)
    assert (preprocess(image, spec, "uint8") == 255).all()


def test_crop_of_an_oblong_input_keeps_its_aspect_ratio() -> None:
    image = solid((0, 0, 0), 100, 100)
    image[25:75] = (255, 255, 255)  # input 2:1: the largest box is 100 x 50
    spec = replace(RAW, width_px=8, height_px=4)
    assert (preprocess(image, spec, "uint8") == 255).all()


def test_squash_uses_the_whole_picture() -> None:
    image = noise(30, 70)
    expected = np.asarray(Image.fromarray(image).resize((4, 4), Image.Resampling.BILINEAR))
    spec = replace(RAW, resize="squash", interpolation="bilinear")
    np.testing.assert_array_equal(preprocess(image, spec, "uint8"), expected)


def test_shrinking_is_antialiased() -> None:
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    image[:, ::2] = 255  # stripes of one pixel: sampled points would be all black or all white
    spec = replace(RAW, resize="squash")
    np.testing.assert_allclose(preprocess(image, spec, "uint8").astype(int), 127.5, atol=8)


def test_letterbox_pads_with_grey_114_around_the_centre() -> None:
    spec = replace(RAW, width_px=8, height_px=8, resize="letterbox")
    values = preprocess(solid((200, 0, 0), 20, 40), spec, "uint8")
    np.testing.assert_array_equal(values[2:6], np.broadcast_to((200, 0, 0), (4, 8, 3)))
    assert (values[:2] == 114).all()
    assert (values[6:] == 114).all()


def test_picture_of_the_right_size_is_untouched() -> None:
    image = noise(4, 4)
    np.testing.assert_array_equal(preprocess(image, RAW, "uint8"), image)


@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    resize=st.sampled_from(["crop", "squash", "letterbox"]),
    fraction=st.floats(0.01, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_any_size_gives_the_declared_shape(height: int, width: int, resize: Any, fraction: float) -> None:
    spec = PreprocessSpec(width_px=6, height_px=3, resize=resize, crop_fraction=fraction)
    values = preprocess(noise(height, width), spec, "float32")
    assert values.shape == (3, 3, 6)
    assert ((values >= 0) & (values <= 1)).all()


@pytest.mark.parametrize("shape", [(5, 5), (5, 5, 4), (0, 5, 3)])
def test_arrays_that_are_no_rgb_picture_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidImage, match="shape"):
        preprocess(np.zeros(shape, dtype=np.uint8), RAW, "uint8")
