"""What is said and refused of images before and while a model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift.engine import memory_plan
from chairlift.engine.model_check import check_model
from chairlift.errors import InvalidParameter, UnsupportedModel
from tests.api.cli_runner import run
from tests.models.checkpoints import make_reference, save
from tests.models.tiny_configs import tiny_config
from tests.tiny import byte_level_tokenizer
from tests.vision.families import Reference
from tests.vision.test_tokens import open_llm

Tiny = Callable[[str], tuple[Path, Reference]]


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_the_check_counts_what_a_start_takes(model_type: str, tiny: Tiny) -> None:
    folder, _ = tiny(model_type)
    images = check_model(str(folder)).images
    assert images is not None
    assert images.obstacle is None
    with open_llm(folder) as llm:
        assert llm._images is not None
        assert images.tokens_per_megapixel == llm._images.tokens_of(1024, 1024)[0]
        encoder = llm.engine.rotary_positions.__self__  # type: ignore[union-attr]
        assert images.weight_bytes == encoder.num_bytes
    text = run("models", "--check", str(folder)).stdout
    assert f"{images.tokens_per_megapixel} tokens per megapixel" in text
    assert "images are not read" not in text


def test_memory_of_the_vision_part_is_counted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny("gemma3")
    images = check_model(str(folder)).images
    assert images is not None
    plain = check_model(str(folder)).weight_bytes["float32"]
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: plain + images.weight_bytes - 1)
    with pytest.raises(UnsupportedModel, match="of them to read images"):
        open_llm(folder, quantization="none")


def test_images_that_are_asked_for_and_cannot_be_read(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = tiny("qwen2_5_vl")
    with pytest.raises(InvalidParameter, match="images: cannot be read: its text part runs on transformers' code"):
        open_llm(folder, images="on", model_impl="transformers")
    save(make_reference(tiny_config("llama")), tmp_path)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidParameter, match="images: cannot be read: this model reads text only"):
        open_llm(tmp_path, images="on")


def test_a_check_of_text_models_says_nothing_of_images(tmp_path: Path) -> None:
    save(make_reference(tiny_config("llama")), tmp_path)
    assert dataclasses.asdict(check_model(str(tmp_path)))["images"] is None
