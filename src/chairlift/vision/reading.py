"""Reads images that come from outside: bounded before they are decoded, upright, and in three colours."""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_BYTES = 20 << 20
MAX_PIXELS = 18_000_000  # They are decoded in a fraction of a second and 300 MB.
MAX_SIDE_RATIO = 200
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_PROBLEMS = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, OverflowError, EOFError)
_WHITE = (255, 255, 255, 255)


def read_image(source: Any, parameter: str = "image") -> Image:
    """The picture that a caller of this process gives: one of Pillow, bytes, or a path."""
    from PIL import Image

    if isinstance(source, Image.Image):
        _check_size(source.size, parameter)
        return _upright(source, parameter)
    if isinstance(source, bytes | bytearray):
        return decode_image(bytes(source), parameter)
    if isinstance(source, str) and source.startswith("data:"):
        return decode_image(data_of_url(source, parameter), parameter)
    if not isinstance(source, str | Path):
        problem = f"must be a picture of Pillow, bytes, a path or a data URL, got {type(source).__name__}"
        raise InvalidParameter(parameter, problem)
    try:
        with Path(source).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InvalidParameter(parameter, f"cannot be read: {error}") from error
    return decode_image(data, parameter)


def data_of_url(url: str, parameter: str) -> bytes:
    """The bytes in a data URL."""
    begin = _DATA_URL.match(url[:300])
    if begin is None:
        raise InvalidParameter(parameter, "is no data URL in base64, such as data:image/png;base64,…")
    if begin[1] is not None and not begin[1].lower().startswith(("image/", "application/octet-stream")):
        raise InvalidParameter(parameter, f"must be an image, got {begin[1][:60]}")
    return decode_base64(url[begin.end() :], parameter)


def decode_base64(text: str, parameter: str) -> bytes:
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise InvalidParameter(parameter, f"has more than {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameter(parameter, f"is not valid base64: {error}") from error


def decode_image(data: bytes, parameter: str = "image") -> Image:
    """Decode a file, of which only the header is read before its size is known to be acceptable."""
    from PIL import Image, UnidentifiedImageError

    if len(data) > MAX_BYTES:
        raise InvalidParameter(parameter, f"has more than {MAX_BYTES:,} bytes")
    if not data:
        raise InvalidParameter(parameter, "is empty")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise InvalidParameter(parameter, f"is no image, or not one of {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise InvalidParameter(parameter, f"has too many pixels; the limit is {MAX_PIXELS:,}") from error
    except (*_PROBLEMS, struct.error, zlib.error) as error:
        raise InvalidParameter(parameter, f"has a damaged header: {error}") from error
    _check_size(image.size, parameter)
    return _upright(image, parameter)


def _check_size(size: tuple[int, int], parameter: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidParameter(parameter, f"has no pixels: {width} x {height}")
    if width * height > MAX_PIXELS:
        raise InvalidParameter(parameter, f"has {width} x {height} pixels; the limit is {MAX_PIXELS:,} in all")
    if max(size) > MAX_SIDE_RATIO * min(size):
        problem = f"has {width} x {height} pixels; one side may be at most {MAX_SIDE_RATIO} times the other"
        raise InvalidParameter(parameter, problem)


def _upright(image: Image, parameter: str) -> Image:
    """Decode the pixels, turn them as the camera says, and make them RGB: what is transparent becomes white."""
    import PIL.Image
    from PIL import ImageOps

    try:
        image.load()
    except MemoryError:
        raise
    except (*_PROBLEMS, struct.error, zlib.error, PIL.Image.DecompressionBombError) as error:
        raise InvalidParameter(parameter, f"is damaged: {error}") from error
    with suppress(*_PROBLEMS, struct.error, zlib.error):  # A damaged note about the camera is not followed.
        image = ImageOps.exif_transpose(image)
    try:
        return _as_rgb(image)
    except (*_PROBLEMS, struct.error) as error:
        raise InvalidParameter(parameter, f"has colours of a kind that is not supported: {error}") from error


def _as_rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode == "RGB":
        return image
    if image.mode.startswith("I") or image.mode == "F":
        # Pictures with 16 bits per pixel; others of these modes cannot come from the formats that are read.
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        behind = PIL.Image.new("RGBA", image.size, _WHITE)
        behind.alpha_composite(image.convert("RGBA"))
        return behind.convert("RGB")
    return image.convert("RGB")
