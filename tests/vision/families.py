"""Tiny random checkpoints of models that read images, with a processor and a tokenizer, and transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from chairlift.vision.processor import _make_processor
from tests.comparison import TIE
from tests.models.checkpoints import SIZES
from tests.models.tiny_configs import tiny_config
from tests.tiny import byte_level_tokenizer

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "intermediate_size": 48,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 60,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
}
HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1}  # of 12 dimensions
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """How a tiny checkpoint of a type of model is made."""

    text: dict[str, Any]
    special: Sequence[str]  # tokens of its tokenizer
    marker: str  # what the processor replaces
    placeholder: str  # what stands for one embedding
    image_processor: dict[str, Any]
    vision: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # fields of the whole model
    token_field: str = "image_token_id"
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_PICTURES = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 30, "temporal_patch_size": 2, "merge_size": 2}


def _qwen(text: dict[str, Any], patch: int = 14, **vision: Any) -> Family:
    return Family(
        text=HEADS | text,
        special=QWEN_TOKENS,
        marker="<|image_pad|>",
        placeholder="<|image_pad|>",
        image_processor={"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch} | QWEN_PICTURES,
        vision={"patch_size": patch, "window_size": 56} | vision,
    )


LLAVA_SPECIAL = ("<image>", "<video>")
IDEFICS_SPECIAL = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)


def _idefics(name: str) -> Family:
    pictures = {
        "image_processor_type": f"{name}ImageProcessor",
        "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 28},
    }
    return Family(
        text={"model_type": "llama"},
        special=IDEFICS_SPECIAL,
        marker="<image>",
        placeholder="<image>",
        image_processor=pictures,
        vision={"patch_size": 7},
        config={"scale_factor": 2},
        processor={"image_seq_len": 4, "processor_class": f"{name}Processor"},
    )


FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": _qwen({"rope_parameters": MROPE}),
    "qwen3_vl": _qwen({"head_dim": 12, "rope_parameters": MROPE | {"mrope_interleaved": True}}),
    "qwen3_vl_moe": _qwen(
        {
            "head_dim": 12,
            "rope_parameters": MROPE,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_experts": 4,
        }
    ),
    "gemma3": Family(
        text={"model_type": "gemma3_text"},
        special=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        marker="<start_of_image>",
        placeholder="<image_soft_token>",
        image_processor={"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        vision={"patch_size": 7},
        config={"mm_tokens_per_image": 4},
        token_field="image_token_id",
        tokenizer_config={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        processor={"image_seq_length": 4, "processor_class": "Gemma3Processor"},
    ),
    "idefics3": _idefics("Idefics3"),
    "smolvlm": _idefics("SmolVLM"),
    "llava_onevision": Family(
        text={"model_type": "qwen2"},
        special=LLAVA_SPECIAL,
        marker="<image>",
        placeholder="<image>",
        image_processor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28]],
        },
        vision={"patch_size": 7},
        config={"image_grid_pinpoints": [[28, 56], [56, 28]], "vision_feature_layer": -1},
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
        },
    ),
    "mistral3": Family(
        text={"model_type": "mistral"},
        special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        marker="[IMG]",
        placeholder="[IMG]",
        image_processor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": 14, "width": 14},
        },
        vision={"image_size": 112},
        config={"spatial_merge_size": 2, "vision_feature_layer": -1},
        processor={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    ),
    "internvl": Family(
        text={"model_type": "qwen2"},
        special=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        marker="<IMG_CONTEXT>",
        placeholder="<IMG_CONTEXT>",
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 28, "width": 28},
            "crop_to_patches": True,
            "max_patches": 3,
        },
        vision={"patch_size": [7, 7], "image_size": [28, 28]},
        config={"downsample_ratio": 0.5},
        tokenizer_config={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
}


def write_checkpoint(model_type: str, folder: Path) -> Any:
    """Write a checkpoint; return the model of transformers."""
    import transformers

    family = FAMILIES[model_type]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(vocab_size=360, more_special=family.special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"} | family.tokenizer_config
    settings["chat_template"] = TEMPLATE.replace("MARKER", family.marker)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(family.image_processor))
    if family.processor:
        (folder / "processor_config.json").write_text(json.dumps(family.processor))
    make = transformers.CONFIG_MAPPING[model_type]
    base = make()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 1024, "eos_token_id": 2}
    if "model_type" in family.text:
        text = tiny_config(family.text["model_type"]).to_dict() | sizes | family.text
    else:
        text = base.get_text_config().to_dict() | SIZES | sizes | family.text
        text |= {"layer_types": None} if "layer_types" in text and "layer_types" not in family.text else {}
    known = base.vision_config.to_dict()
    vision = {name: value for name, value in VISION.items() if name in known} | {"model_type": known["model_type"]}
    vision |= {"out_hidden_size": text["hidden_size"]} if "out_hidden_size" in known else {}
    vision |= {name: value for name, value in family.vision.items() if name in known}
    torch.manual_seed(0)
    token_id = tokenizer.token_to_id(family.placeholder)
    config = make(text_config=text, vision_config=vision, **{family.token_field: token_id}, **family.config)
    for each in (config, config.get_text_config()):
        each._experts_implementation = "eager"
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[make](config).eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.05 if name.endswith("bias") else 0.3))
            else:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
        if whole.get_output_embeddings().weight is whole.get_input_embeddings().weight:
            whole.get_input_embeddings().weight.mul_(0.25)
    whole.set_attn_implementation("eager")
    whole.save_pretrained(folder)
    return whole


def picture(seed: int, width: int = 90, height: int = 60) -> Image.Image:
    """Smooth noise, so that resizing keeps what tells pictures apart."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@dataclass(frozen=True)
class Reference:
    """Transformers with a tiny checkpoint."""

    model: Any
    processor: Any

    @classmethod
    def of(cls, model: Any, folder: Path) -> Reference:
        config = json.loads((folder / "config.json").read_text())
        return cls(model, _make_processor(folder, config))

    def prompt(self, text: str, images: Sequence[Image.Image]) -> list[int]:
        """The tokens of a prompt with a marker for each image."""
        return [int(token) for token in self._inputs(text, images)["input_ids"][0]]

    def _inputs(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        return dict(self.processor(text=[text], images=[list(images)] if images else None, return_tensors="pt"))

    @torch.inference_mode()
    def check(self, text: str, images: Sequence[Image.Image], actual: Sequence[int]) -> None:
        """Check that each token is the one that transformers chooses after those before it, or one that ties."""
        inputs = self._inputs(text, images)
        given = torch.tensor([list(actual[:-1])])
        for name in inputs:
            if name == "input_ids":
                inputs[name] = torch.cat([inputs[name], given], dim=1)
            elif name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
                filler = torch.full_like(given, int(name == "attention_mask"))
                inputs[name] = torch.cat([inputs[name], filler], dim=1)
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None  # That of an earlier prompt would be used.
        logits = self.model(**inputs, use_cache=False).logits[0, -len(actual) :].double()
        for place, (token, scores) in enumerate(zip(actual, logits, strict=True)):
            best = int(scores.argmax())
            gap = float(scores[best] - scores[token])
            assert gap <= TIE, f"token {place} of {len(images)} images is {token}, not {best} (gap {gap:.2e})"
