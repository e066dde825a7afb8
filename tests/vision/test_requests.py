"""What a request with images may cost, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.errors import CONTEXT_LENGTH_EXCEEDED, InvalidParameter
from chairlift.text.images import ChatImages
from chairlift.vision import processor as processor_module
from chairlift.vision import reading
from chairlift.vision.processor import MAX_IMAGES, ImageProcessor
from tests.vision.families import FAMILIES, Reference, picture

Tiny = Callable[[str], tuple[Path, Reference]]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory": "4MiB", "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
MARKER = FAMILIES["qwen2_5_vl"].marker


@pytest.fixture
def llm(tiny: Tiny) -> Iterator[LLM]:
    folder, _ = tiny("qwen2_5_vl")
    with LLM(str(folder), progress=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def processor(llm: LLM) -> ImageProcessor:
    assert llm._images is not None
    return llm._images


def chat_of(count: int) -> ChatImages:
    return ChatImages(sources=[None] * count, locations=[f"messages[{i}]" for i in range(count)])


def test_too_many_images_are_refused_before_one_is_read(processor: ImageProcessor) -> None:
    read = list[int]()
    pictures = (read.append(i) or picture(1) for i in range(1000))  # type: ignore[func-returns-value]
    with pytest.raises(InvalidParameter, match=rf"messages\[{MAX_IMAGES}\]: is one of 1000 images"):
        processor.prepare_chat(chat_of(1000), pictures)
    assert not read


def test_images_are_read_one_by_one_until_their_pixels_or_tokens_are_too_many(
    processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_module, "MAX_PIXELS_IN_ALL", 25_000)
    with pytest.raises(InvalidParameter, match=r"messages\[2\]: is one too many.*25,000 pixels"):
        processor.prepare_chat(chat_of(4), (Image.new("RGB", (100, 100)) for _ in range(4)))
    with pytest.raises(InvalidParameter, match=r"messages\[1\]: is one too many.*tokens") as refusal:
        processor.prepare_chat(chat_of(2), (Image.new("RGB", (100, 100)) for _ in range(2)), max_tokens=20)
    assert refusal.value.code == CONTEXT_LENGTH_EXCEEDED


def test_an_image_that_cannot_be_encoded_ends_its_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = llm._open.images.encoder  # type: ignore[union-attr]
    encode = encoder._encode_alike

    def encode_or_raise(images: Any) -> Any:
        if any(image.data["pixel_values"].max() < 0 for image in images):
            raise KeyError("black")
        return encode(images)

    monkeypatch.setattr(encoder, "_encode_alike", encode_or_raise)
    prompts = [{"prompt": f"see {MARKER}", "images": [each]} for each in (Image.new("RGB", (90, 60)), picture(1))]
    bad, good = llm.generate([*prompts], GREEDY, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "black" in str(bad.outputs[0].stop_reason)
    assert good.outputs[0].finish_reason == "length"
    assert llm.generate("go on", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_images_side_by_side_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="no token between them"):
        llm.generate({"prompt": f"see {MARKER}{MARKER}", "images": [picture(1), picture(2)]}, GREEDY, use_tqdm=False)


def test_closing_ends_the_threads_of_images(tiny: Tiny) -> None:
    folder, _ = tiny("qwen2_5_vl")
    llm = LLM(str(folder), progress=False, max_prefill_tokens=2, **OPTIONS)
    assert llm._images is not None
    prepared = llm._images.prepare(f"see {MARKER}", [picture(1, 300, 200)])
    llm.engine.submit(prepared.tokens, GREEDY, images=prepared.images)
    llm.engine.step()
    threads = [each for each in threading.enumerate() if each.name == "image encoder"]
    assert threads
    llm.close()
    assert not any(each.is_alive() for each in threads)


def test_images_are_read_beside_the_event_loop(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny("qwen2_5_vl")
    readers, read = list[threading.Thread](), reading.read_image

    def read_noted(*source: Any) -> Image.Image:
        readers.append(threading.current_thread())
        return read(*source)

    monkeypatch.setattr(reading, "read_image", read_noted)

    async def ask() -> None:
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            await llm.generate({"prompt": f"see {MARKER}", "images": [picture(1)]}, GREEDY)
            await llm.chat([{"role": "user", "content": [{"type": "image", "image": picture(2)}]}], GREEDY)

    asyncio.run(ask())
    assert len(readers) == 2
    assert threading.main_thread() not in readers
