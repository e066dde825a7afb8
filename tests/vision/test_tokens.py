"""Greedy tokens of prompts with images are those of transformers, however the work is divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from chairlift import LLM, SamplingParams
from tests.vision.families import FAMILIES, Reference, picture

Tiny = Callable[[str], tuple[Path, Reference]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", kv_memory="4MiB", threads=1, progress=False, **options)


def cases(marker: str) -> list[tuple[str, list[Image.Image]]]:
    """Prompts with no image, one and three, in different places."""
    first, second, third = picture(1, 90, 60), picture(2, 60, 90), picture(3, 130, 60)
    return [
        ("hello there, who are you", []),
        (f"see {marker} and say what it is", [first]),
        (f"{marker} first, then {marker} and at last {marker}", [second, first, third]),
    ]


def generate(llm: LLM, prompts: Sequence[tuple[str, list[Image.Image]]], params: SamplingParams = GREEDY) -> Any:
    return llm.generate([{"prompt": text, "images": images} for text, images in prompts], params, use_tqdm=False)


def check(reference: Reference, prompts: Sequence[tuple[str, list[Image.Image]]], results: Sequence[Any]) -> None:
    for (text, images), result in zip(prompts, results, strict=True):
        assert result.prompt_token_ids == reference.prompt(text, images)
        for completion in result.outputs:
            assert completion.finish_reason == "length", completion.stop_reason
            reference.check(text, images, completion.token_ids)


# One family of each kind: positions in two dimensions, tokens that see each other, images in several pieces.
KINDS = ["qwen2_5_vl", "gemma3", "idefics3"]
SETTINGS = [
    pytest.param(model_type, chunk, marks=() if chunk == 7 or model_type in KINDS else pytest.mark.slow)
    for model_type in FAMILIES
    for chunk in (None, 1, 7, 64)
]


@pytest.mark.parametrize(("model_type", "chunk"), SETTINGS)
def test_tokens_are_those_of_transformers(model_type: str, chunk: int | None, tiny: Tiny) -> None:
    """Together, in chunks that end within images, then alone and warm; an image of two prompts is encoded once."""
    folder, reference = tiny(model_type)
    prompts = cases(FAMILIES[model_type].marker)
    with open_llm(folder, max_prefill_tokens=chunk) as llm:
        check(reference, prompts, generate(llm, prompts))
        images = llm.engine.scheduler.images
        assert images is not None
        # LLaVA-OneVision prepares an image of several otherwise than the only one of a prompt.
        distinct = 4 if model_type == "llava_onevision" else 3
        assert images.usage.encoded == distinct
        for prompt in prompts:
            check(reference, [prompt], generate(llm, [prompt]))
        assert images.usage.encoded == distinct, "the second time, keys and values are in the cache"
        images.check()


@pytest.mark.parametrize("model_type", KINDS)
class TestStates:
    """What a prefix cache, preemption, drafts and completions of one prompt must not change."""

    def test_other_image_and_same_text(self, model_type: str, tiny: Tiny) -> None:
        folder, reference = tiny(model_type)
        text = f"words that fill a block before the picture {FAMILIES[model_type].marker} and others behind it"
        with open_llm(folder, block_size=4) as llm:
            for seed in (1, 2, 1):
                prompt = (text, [picture(seed)])
                check(reference, [prompt], generate(llm, [prompt]))
            images = llm.engine.scheduler.images
            assert images is not None
            assert images.usage.encoded == 2

    def test_preempted(self, model_type: str, tiny: Tiny) -> None:
        folder, reference = tiny(model_type)
        prompts = cases(FAMILIES[model_type].marker) * 2
        needed = max(len(reference.prompt(*prompt)) for prompt in prompts) + 12
        with open_llm(folder, prefix_caching=False, block_size=4, preemption="recompute") as llm:
            kv = llm.engine.scheduler.kv
            spare = kv.pool.take(kv.num_blocks - kv.blocks_for(needed) - 4)
            assert spare
            check(reference, prompts, generate(llm, prompts))
            llm.engine.scheduler.kv.pool.release(spare)

    def test_ngram_drafts(self, model_type: str, tiny: Tiny) -> None:
        folder, reference = tiny(model_type)
        prompts = cases(FAMILIES[model_type].marker)
        with open_llm(folder, speculate="ngram") as llm:
            check(reference, prompts, generate(llm, prompts, GREEDY.clone(max_tokens=30)))

    def test_completions_of_one_prompt(self, model_type: str, tiny: Tiny) -> None:
        folder, reference = tiny(model_type)
        prompts = cases(FAMILIES[model_type].marker)
        with open_llm(folder) as llm:
            check(reference, prompts, generate(llm, prompts, GREEDY.clone(n=3)))

    def test_room_for_one_image_at_a_time(self, model_type: str, tiny: Tiny) -> None:
        folder, reference = tiny(model_type)
        prompts = cases(FAMILIES[model_type].marker) * 2
        with open_llm(folder, prefix_caching=False) as llm:
            images = llm.engine.scheduler.images
            assert images is not None
            assert llm.engine.scheduler.images is not None
            images.capacity = max(image.rows for image in prepared_images(llm, prompts))
            check(reference, prompts, generate(llm, prompts))
            assert images.usage.evicted > 0
            images.check()

    @pytest.mark.parametrize("attention", ["bursted", "padded"])
    def test_other_attention(self, model_type: str, attention: str, tiny: Tiny) -> None:
        folder, reference = tiny(model_type)
        prompts = cases(FAMILIES[model_type].marker)
        with open_llm(folder, attention=attention, max_prefill_tokens=11) as llm:
            check(reference, prompts, generate(llm, prompts))


def prepared_images(llm: LLM, prompts: Sequence[tuple[str, list[Image.Image]]]) -> list[Any]:
    assert llm._images is not None
    return [image for text, images in prompts for image in llm._images.prepare(text, images).images]
