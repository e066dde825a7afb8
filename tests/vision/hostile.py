"""Pictures that are damaged, far too large, or of unusual kinds: (name, bytes, whether they are read).

None: either is right, since it depends on the decoder how much of a damaged file it accepts.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from tests.vision.families import picture


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes, bits: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + b"".join(more) + png_chunk(b"IDAT", data or zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunks + png_chunk(b"IEND", b"")


def with_orientation(number: int) -> bytes:
    image = picture(1, 30, 20)
    exif = image.getexif()
    exif[274] = number
    return encoded(image, "JPEG", exif=exif.tobytes())


def hostile() -> Iterator[tuple[str, bytes, bool | None]]:
    plain = picture(1, 300, 200)
    files = {kind: encoded(plain, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
    for kind, data in files.items():
        yield f"{kind} that is whole", data, True
        yield f"{kind} of 20 bytes", data[:20], False
        yield f"{kind} cut in half", data[: len(data) // 2], False
        noisy = bytearray(data)
        for place in random.Random(1).sample(range(30, len(noisy)), 40):
            noisy[place] ^= 0xFF
        yield f"{kind} with noise", bytes(noisy), True if kind == "BMP" else None
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        yield f"PNG of mode {mode}", encoded(plain.convert(mode), "PNG"), True
    yield "JPEG of mode CMYK", encoded(plain.convert("CMYK"), "JPEG"), True
    yield "JPEG of mode L", encoded(plain.convert("L"), "JPEG"), True
    yield "PNG of a palette with transparency", encoded(plain.convert("P"), "PNG", transparency=3), True
    for number in (0, 1, 3, 6, 8, 9, 65535):
        yield f"JPEG with orientation {number}", with_orientation(number), True
    exif = b"Exif\0\0II*\0" + b"\xff" * 200
    yield "JPEG with a damaged note", encoded(plain, "JPEG", exif=exif), True
    yield "nothing", b"", False
    yield "text", b"this is a picture", False
    yield "zeros", b"\0" * 100_000, False
    yield "SVG", b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", False
    yield "TIFF", encoded(plain, "TIFF"), False
    yield "ICO", encoded(plain, "ICO"), False
    yield "PPM", encoded(plain, "PPM"), False
    yield "PDF", encoded(plain, "PDF"), False
    yield "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) run\n", False
    yield "zip", b"PK\3\4" + b"\0" * 1000, False
    yield "PNG of 65535 x 65535", png(65535, 65535), False
    yield "PNG of 2^31 - 1", png(2**31 - 1, 2**31 - 1), False
    yield "PNG of 0 x 0", png(0, 0), False
    yield "PNG of 1 x 100000", png(1, 100_000), False
    yield "PNG of 4900 x 4900", png(4900, 4900), False
    yield "PNG of 4200 x 4200 zeros", png(4200, 4200, data=zlib.compress(b"\0" * (4200 * 3 + 1) * 4200, 9)), True
    yield "PNG without its pixels", png(4000, 5000), False
    bomb = zlib.compress(b"a" * 200_000_000, 9)
    yield "PNG with a large profile", png(10, 10, png_chunk(b"iCCP", b"x\0\0" + bomb)), False
    yield "PNG with a large text", png(10, 10, png_chunk(b"zTXt", b"x\0\0" + bomb)), False
    yield "PNG with pixels that go on", png(10, 10, data=bomb), None
    yield "PNG with a header twice", png(10, 10, png_chunk(b"IHDR", b"\0" * 13)), False
    yield (
        "BMP of 2^31 - 1",
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 2**31 - 1, 99, 1, 24, *[0] * 6),
        False,
    )
    frames = [Image.new("P", (200, 200), color) for color in range(64)] * 4
    animation = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield "GIF of many frames", animation, True
    yield "GIF with a frame outside of it", animation[:6] + b"\1\0\1\0" + animation[10:], None
    yield "JPEG of 4200 x 4200", encoded(Image.new("RGB", (4200, 4200)), "JPEG"), True
    yield "WEBP of 16383 x 1090", encoded(Image.new("RGB", (16383, 1090)), "WEBP", quality=1, method=0), True
    yield "20 MiB and one byte", b"\x89PNG\r\n\x1a\n" + b"\0" * (20 << 20), False
