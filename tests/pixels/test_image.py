"""decode_image: pictures are made here, by Pillow and numpy, so that what is right is known without it."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from edgerun.errors import InvalidImage
from edgerun.pixels.image import ImageLimits, decode_image


def corners(height: int = 8, width: int = 12) -> NDArray[np.uint8]:
    """Top left red, top right green, bottom left blue, bottom right white: no two turns look alike."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2] = (250, 10, 10)
    pixels[: height // 2, width // 2 :] = (10, 250, 10)
    pixels[height // 2 :, : width // 2] = (10, 10, 250)
    pixels[height // 2 :, width // 2 :] = (250, 250, 250)
    return pixels


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png(pixels: NDArray[Any]) -> bytes:
    return encode(Image.fromarray(pixels), "PNG")


def png_header(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds no pixels at all."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
def test_lossless_formats_give_the_stored_pixels(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    decoded = decode_image(encode(Image.fromarray(corners()), format, **options))
    np.testing.assert_array_equal(decoded, corners())
    assert decoded.dtype == np.uint8
    assert decoded.flags.c_contiguous
    assert decoded.flags.writeable


def test_jpeg_is_decoded_in_full_resolution() -> None:
    pixels = np.full((301, 203, 3), (200, 100, 50), dtype=np.uint8)
    decoded = decode_image(encode(Image.fromarray(pixels), "JPEG", quality=95))
    assert decoded.shape == (301, 203, 3)
    np.testing.assert_allclose(decoded, pixels, atol=3)  # JPEG's own loss on a flat colour


@pytest.mark.parametrize(
    ("orientation", "stored"),
    [
        (1, lambda up: up),
        (2, lambda up: up[:, ::-1]),
        (3, lambda up: up[::-1, ::-1]),
        (4, lambda up: up[::-1]),
        (5, lambda up: up.transpose(1, 0, 2)),
        (6, lambda up: np.rot90(up, 1)),  # the camera lay on its right side
        (7, lambda up: np.rot90(up, 2).transpose(1, 0, 2)),
        (8, lambda up: np.rot90(up, -1)),
    ],
)
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_once(format: str, orientation: int, stored: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    image = Image.fromarray(np.ascontiguousarray(stored(corners())))
    np.testing.assert_array_equal(decode_image(encode(image, format, exif=exif, **options)), corners())


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_exif_orientation_of_a_jpeg_is_applied(orientation: int) -> None:
    stored = np.rot90(corners(32, 48), {3: 2, 6: 1, 8: -1}[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    decoded = decode_image(encode(image, "JPEG", exif=exif, quality=95, subsampling=0))
    assert decoded.shape == (32, 48, 3)
    np.testing.assert_allclose(decoded, corners(32, 48), atol=12)  # loss at the block that meets the edges


def test_unreadable_exif_block_does_not_spoil_the_picture() -> None:
    data = encode(
        Image.fromarray(corners()), "WEBP", lossless=True, exif=b"Exif\x00\x00MM\x00\x2a\xff\xff\xff\xff"
    )
    np.testing.assert_array_equal(decode_image(data), corners())


def test_cmyk_jpeg_has_the_colours_of_its_rgb_twin() -> None:
    # 0 % cyan, 60 % magenta, 80 % yellow, 20 % black, as a share of 255; RGB = (1 - ink) * (1 - black)
    inks = np.full((16, 16, 4), (0, 153, 204, 51), dtype=np.uint8)
    decoded = decode_image(encode(Image.fromarray(inks, mode="CMYK"), "JPEG", quality=100))
    assert b"Adobe" in encode(Image.fromarray(inks, mode="CMYK"), "JPEG", quality=100)
    np.testing.assert_allclose(decoded[8, 8], (204, 82, 41), atol=3)


def test_cmyk_tiff_is_not_inverted() -> None:
    inks = np.full((4, 4, 4), (0, 255, 255, 0), dtype=np.uint8)
    np.testing.assert_array_equal(
        decode_image(encode(Image.fromarray(inks, mode="CMYK"), "TIFF"))[0, 0], (255, 0, 0)
    )


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_high_byte(format: str) -> None:
    samples = np.array([[0, 255, 256], [0x80FF, 0xFF00, 0xFFFF]], dtype=np.uint16)
    decoded = decode_image(encode(Image.fromarray(samples), format))
    np.testing.assert_array_equal(decoded[:, :, 0], [[0, 0, 1], [128, 255, 255]])
    assert (decoded == decoded[:, :, :1]).all()


def test_big_endian_16_bit_grey_is_not_byte_swapped() -> None:
    samples = np.array([[0x1234, 0xFEDC]], dtype=np.uint16)
    entries = [(256, 2), (257, 1), (258, 16), (259, 1), (262, 1), (273, 8), (278, 1), (279, 4)]
    directory = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in entries)
    data = b"MM\x00\x2a" + struct.pack(">I", 12) + samples.astype(">u2").tobytes()
    data += struct.pack(">H", len(entries)) + directory + struct.pack(">I", 0)
    np.testing.assert_array_equal(decode_image(data)[0, :, 0], [0x12, 0xFE])


def test_32_bit_integers_within_16_bits_are_scaled_and_wider_ones_refused() -> None:
    narrow = np.array([[0, 0x8000, 0xFFFF]], dtype=np.int32)
    np.testing.assert_array_equal(
        decode_image(encode(Image.fromarray(narrow), "TIFF"))[0, :, 0], [0, 128, 255]
    )
    for wide in ([[0, 0x10000]], [[-1, 5]]):
        with pytest.raises(InvalidImage, match="32-bit samples"):
            decode_image(encode(Image.fromarray(np.array(wide, dtype=np.int32)), "TIFF"))


def test_float_grey_is_read_as_0_to_1_and_other_ranges_are_refused() -> None:
    samples = np.array([[0.0, 0.5, 1.0]], dtype=np.float32)
    np.testing.assert_array_equal(
        decode_image(encode(Image.fromarray(samples), "TIFF"))[0, :, 0], [0, 128, 255]
    )
    for wrong in ([[0.0, 1.5]], [[-0.1, 0.5]], [[0.0, float("nan")]]):
        with pytest.raises(InvalidImage, match="float samples"):
            decode_image(encode(Image.fromarray(np.array(wrong, dtype=np.float32)), "TIFF"))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_composed_on_white_and_the_hidden_colour_never_shows(format: str) -> None:
    pixels = np.zeros((1, 3, 4), dtype=np.uint8)
    pixels[0] = [(0, 255, 0, 0), (200, 0, 0, 255), (0, 0, 0, 51)]  # hidden green; opaque red; 20 % black
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    decoded = decode_image(encode(Image.fromarray(pixels), format, **options))
    np.testing.assert_array_equal(decoded[0], [(255, 255, 255), (200, 0, 0), (204, 204, 204)])


def test_grey_with_alpha_is_composed_on_white() -> None:
    pixels = np.array([[[0, 0], [100, 255], [0, 51]]], dtype=np.uint8)
    decoded = decode_image(encode(Image.fromarray(pixels, mode="LA"), "PNG"))
    np.testing.assert_array_equal(decoded[0, :, 0], [255, 100, 204])


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_transparent_palette_entry_becomes_white(format: str) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], dtype=np.uint8), mode="P")
    image.putpalette([10, 20, 30, 0, 255, 0, 40, 50, 60])
    decoded = decode_image(encode(image, format, transparency=1))
    np.testing.assert_array_equal(decoded[0], [(10, 20, 30), (255, 255, 255), (40, 50, 60)])


def test_transparent_colour_key_of_an_rgb_png_becomes_white() -> None:
    pixels = np.array([[[1, 2, 3], [9, 9, 9]]], dtype=np.uint8)
    decoded = decode_image(encode(Image.fromarray(pixels), "PNG", transparency=(1, 2, 3)))
    np.testing.assert_array_equal(decoded[0], [(255, 255, 255), (9, 9, 9)])


def test_palette_and_one_bit_pictures_become_rgb() -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), mode="P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    np.testing.assert_array_equal(decode_image(encode(image, "PNG"))[0], [(10, 20, 30), (40, 50, 60)])
    bits = Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert("1")
    np.testing.assert_array_equal(decode_image(encode(bits, "PNG"))[0], [(0, 0, 0), (255, 255, 255)])


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation_counts(format: str) -> None:
    first, second = Image.fromarray(corners()), Image.fromarray(255 - corners())
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(first, format, save_all=True, append_images=[second], **options)
    np.testing.assert_array_equal(decode_image(data), corners())


def test_lab_picture_has_its_colours_or_is_refused_by_name() -> None:
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    to_lab = ImageCms.buildTransform(*profiles, "RGB", "LAB")
    lab = ImageCms.applyTransform(Image.fromarray(corners()), to_lab)
    assert lab is not None
    try:
        decoded = decode_image(encode(lab, "TIFF"))
    except InvalidImage as error:  # Pillow 11 cannot convert it
        assert "LAB" in error.message
    else:
        np.testing.assert_allclose(
            decoded, corners(), atol=20
        )  # 8 bits of a and b are coarse in full colours


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_file_is_refused(format: str, share: float) -> None:
    noise = np.random.default_rng(1).integers(0, 256, size=(64, 64, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), format)
    with pytest.raises(InvalidImage) as caught:
        decode_image(data[: int(len(data) * share)])
    assert caught.value.details["code"] == "invalid_image"
    assert "\n" not in caught.value.message


def test_damaged_bytes_never_raise_anything_else() -> None:
    random = np.random.default_rng(7)
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        data = encode(Image.fromarray(corners(16, 16)), format)
        for _ in range(60):
            damaged = bytearray(data)
            for position in random.integers(0, len(data), size=4):
                damaged[position] = int(random.integers(0, 256))
            try:
                decoded = decode_image(bytes(damaged), ImageLimits(max_pixels=1_000_000))
            except InvalidImage:
                continue
            except UserWarning:
                continue  # Pillow warns of damaged metadata; pytest turns its warnings into errors
            assert decoded.ndim == 3


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        (b"\xef\xbb\xbf <html>", "HTML"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"only some words", "text"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", "heic"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\x00\x01\x02\x03" * 20, "unknown format"),
        (b"8BPS\x00\x01" + b"\x00" * 40, "unknown format"),  # Pillow would read PSD, we do not
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "text"),  # nor EPS, which runs a program
    ],
)
def test_other_files_are_refused_with_the_formats_that_work(data: bytes, seen: str) -> None:
    with pytest.raises(InvalidImage, match=seen) as caught:
        decode_image(data)
    for name in ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF"):
        assert name in caught.value.message


@pytest.mark.parametrize("side", [30_000, 12_000])
def test_bomb_is_refused_from_its_header(side: int) -> None:
    # The file holds no pixels: had anything been decoded, the error would be about damage, not size.
    with pytest.raises(InvalidImage, match=r"limit") as caught:
        decode_image(png_header(side, side))
    assert caught.value.details["code"] == "image_too_large"


def test_limits_are_those_given() -> None:
    data = png(corners(10, 10))
    assert decode_image(data, ImageLimits(max_pixels=100)).shape == (10, 10, 3)
    with pytest.raises(InvalidImage, match="10 x 10 = 100 pixels, the limit is 99"):
        decode_image(data, ImageLimits(max_pixels=99))
    with pytest.raises(InvalidImage, match=f"{len(data)} bytes, the limit is 10"):
        decode_image(data, ImageLimits(max_bytes=10))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2000), (2000, 1)])
def test_thin_pictures_are_read(shape: tuple[int, int]) -> None:
    pixels = np.full((*shape, 3), 77, dtype=np.uint8)
    np.testing.assert_array_equal(decode_image(png(pixels)), pixels)


def test_many_threads_get_their_own_picture() -> None:
    wrong: list[int] = []

    def check(value: int) -> None:
        data = png(np.full((40, 40, 3), value, dtype=np.uint8))
        for _ in range(20):
            if not (decode_image(data) == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=check, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
