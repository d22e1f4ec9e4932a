"""Bytes of a picture file to upright 8-bit RGB pixels.

Owns: which formats are read, the limits, and how every kind of pixel becomes RGB. Does not know what a
model wants (see preprocess). All functions are thread-safe: no Pillow setting is changed, none is assumed
beyond its defaults.

The rules, where a choice had to be made:
- the format is told by content, never by file name or media type;
- EXIF orientation is applied; the first frame of an animation counts;
- alpha is composed on white, so that the colour hidden under clear areas never shows;
- 16-bit samples keep their high byte (v // 256); colour profiles are not applied;
- a truncated file is refused, not guessed at.
"""

from __future__ import annotations

import io
import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from edgerun.errors import InvalidImage

logger = logging.getLogger(__name__)

# Pillow's names. An explicit list: the other decoders (EPS runs a program, ICO and PSD hold other formats)
# are a surface that no user asked for.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_WORKING = "send a JPEG, PNG, WebP, GIF, BMP or TIFF picture"

_TRANSPOSE = {  # EXIF 2.32, tag 0x0112: what turns the stored pixels upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What is refused before anything is decoded.

    max_pixels is Pillow's own guard against decompression bombs (a quarter of 1 GiB at 3 bytes a pixel).
    """

    max_bytes: int = 64 * 1024 * 1024
    max_pixels: int = 1024 * 1024 * 1024 // 4 // 3


def decode_image(data: bytes, limits: ImageLimits = ImageLimits()) -> NDArray[np.uint8]:
    """The picture as (height, width, 3) uint8 RGB, upright, C-contiguous and writable.

    Raises InvalidImage (details: code "invalid_image" or "image_too_large") when the bytes are no picture of
    a format we read, are damaged or cut off, or lie beyond the limits. The header's size is checked first.
    """
    if not data:
        raise _invalid(f"the picture is empty (0 bytes): {_WORKING}")
    if len(data) > limits.max_bytes:
        raise _too_large(
            f"the picture has {len(data)} bytes, the limit is {limits.max_bytes}: send a smaller one"
        )
    # Pillow's parsers answer hostile bytes with almost any exception (SyntaxError, struct.error, KeyError),
    # so everything but our own errors and a lack of memory means: these bytes are no good picture.
    try:
        image = _open(data, limits)
        try:
            image.load()
            return _upright_rgb(image)
        finally:
            image.close()
    except (InvalidImage, MemoryError):
        raise
    except Exception as error:
        raise _invalid(
            f"the picture is damaged or cut off ({_one_line(error)}): send it again whole"
        ) from error


def _open(data: bytes, limits: ImageLimits) -> Image.Image:
    """Read the header only, and check the size that it declares."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise _invalid(f"the file {_describe(data)}: {_WORKING}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(
            f"the picture has more than the limit of {limits.max_pixels} pixels ({_one_line(error)}): send a"
            " smaller one"
        ) from error
    width, height = image.size
    if width < 1 or height < 1:
        raise _invalid(f"the picture is {width} x {height} pixels: it has no content")
    if width * height > limits.max_pixels:
        raise _too_large(
            f"the picture is {width} x {height} = {width * height} pixels, the limit is {limits.max_pixels}:"
            " send a smaller one"
        )
    return image


def _upright_rgb(image: Image.Image) -> NDArray[np.uint8]:
    turn = _TRANSPOSE.get(_orientation(image))
    rgb = _to_rgb(image)
    if turn is not None:
        rgb = rgb.transpose(turn)
    return np.array(rgb, dtype=np.uint8)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; 1 where there is none or the EXIF block cannot be read, as browsers do."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception as error:  # a broken EXIF block raises as variously as broken pixels do
        logger.debug("unreadable EXIF block ignored: %s", error)
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _grey(np.asarray(image) >> 8)
    if image.mode == "I":
        return _grey(_int32_to_bytes(np.asarray(image)))
    if image.mode == "F":
        return _grey(_float_to_bytes(np.asarray(image)))
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        ground = Image.new("RGBA", colour.size, (255, 255, 255, 255))
        return Image.alpha_composite(ground, colour).convert("RGB")
    try:
        # CMYK: Pillow has already undone the inverted polarity that Adobe writes into JPEG files.
        return image if image.mode == "RGB" else image.convert("RGB")
    except ValueError as error:
        raise _invalid(f"the picture's colour mode is {image.mode}: convert it to RGB") from error


def _grey(samples: NDArray[Any]) -> Image.Image:
    return Image.fromarray(samples.astype(np.uint8)).convert("RGB")


def _int32_to_bytes(samples: NDArray[Any]) -> NDArray[Any]:
    """Mode "I" is how Pillow holds 16-bit files of some kinds; wider values have no agreed white."""
    low, high = int(samples.min()), int(samples.max())
    if low < 0 or high > 0xFFFF:
        raise _invalid(
            f"the picture has 32-bit samples ({low} to {high}): convert it to 8 or 16 bits a sample"
        )
    return samples >> 8


def _float_to_bytes(samples: NDArray[Any]) -> NDArray[Any]:
    """Floating point pictures are 0 (black) to 1 (white) by convention; other ranges are not guessed."""
    low, high = float(samples.min()), float(samples.max())
    if not (low >= 0.0 and high <= 1.0):  # written so that NaN fails too
        raise _invalid(
            f"the picture has float samples from {low:g} to {high:g}: 0 to 1 is read, or 8 or 16 bits"
        )
    return np.rint(samples * 255.0)


def _describe(data: bytes) -> str:
    """What the bytes look like, for the message only."""
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if data[4:8] == b"ftyp":
        return f"is a {data[8:12].decode('ascii', 'replace').strip()} (HEIC, AVIF or video) file"
    if head.startswith(b"%pdf"):
        return "is a PDF document"
    if b"<svg" in head:
        return "is an SVG drawing"
    if head.startswith((b"<!doctype html", b"<html")) or b"<html" in head:
        return "is an HTML page (an error page saved as a picture?)"
    if re.fullmatch(rb"[\x09\x0a\x0d\x20-\x7e\x80-\xff]+", data[:512]):
        return "is text or of an unknown format"
    return "is of an unknown format, or its header is damaged"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text[:200] or type(error).__name__


def _invalid(message: str) -> InvalidImage:
    return InvalidImage(message, code="invalid_image")


def _too_large(message: str) -> InvalidImage:
    return InvalidImage(message, code="image_too_large")
