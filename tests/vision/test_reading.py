"""Pictures from outside are read, or refused with the reason."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from chairlift.errors import InvalidParameter
from chairlift.vision.reading import data_of_url, decode_image, read_image
from tests.vision.families import picture
from tests.vision.hostile import encoded, hostile, with_orientation

HOSTILE = list(hostile())


def test_there_are_sixty() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize(("name", "data", "is_read"), HOSTILE, ids=[name for name, _, _ in HOSTILE])
def test_hostile_pictures(name: str, data: bytes, is_read: bool | None) -> None:
    if is_read is not True:
        refused = pytest.raises(InvalidParameter, match=r"messages\[0\]")
        with suppress(InvalidParameter) if is_read is None else refused:
            decode_image(data, "messages[0].content[1]")
        return
    assert decode_image(data, "image").mode == "RGB"


def test_pictures_are_turned_as_the_camera_says() -> None:
    assert decode_image(with_orientation(1)).size == (30, 20)
    assert decode_image(with_orientation(6)).size == (20, 30)


def test_what_is_transparent_is_white() -> None:
    image = decode_image(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "PNG"))
    assert image.getpixel((1, 1)) == (255, 255, 255)


def test_sixteen_bits_become_eight() -> None:
    numbers = np.array([[0, 65535], [32768, 257]], dtype=np.uint16)
    image = decode_image(encoded(Image.fromarray(numbers), "PNG"))
    assert [image.getpixel((x, y))[0] for y in range(2) for x in range(2)] == [0, 255, 127, 1]  # type: ignore[index]


def test_sources_of_this_process(tmp_path: Path) -> None:
    image = picture(1)
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    for source in (image, data, str(tmp_path / "a.png"), tmp_path / "a.png"):
        assert read_image(source).tobytes() == image.tobytes()


@pytest.mark.parametrize("source", [7, None, "missing.png", "data:image/png;base64,!!", "data:text/html;base64,aaaa"])
def test_other_sources_are_refused(source: object) -> None:
    with pytest.raises(InvalidParameter, match=r"images\[0\]"):
        read_image(source, "images[0]")


def test_errors_of_files_name_the_parameter_once(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"text")
    with pytest.raises(InvalidParameter) as refusal:
        read_image(tmp_path / "a.png", "images[0]")
    assert str(refusal.value).startswith("images[0]: is no image")


@pytest.mark.parametrize("url", ["data:,", "data:image/png,abc", "data:image/png;base64,a", "file:///etc/passwd", ""])
def test_urls_without_data(url: str) -> None:
    with pytest.raises(InvalidParameter):
        data_of_url(url, "image_url")
