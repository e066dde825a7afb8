"""Which models read images here, known from a config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.models import is_native
from chairlift.models.wrappers import kind

# Whole models whose tokens tests compare with those of transformers (tests/vision/families.py).
SHOWN = frozenset(
    (
        *("gemma3", "idefics3", "internvl", "llava_onevision", "mistral3"),
        *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    )
)


def image_obstacle(config: Mapping[str, Any], format: str, device: str, wanted: str) -> str | None:
    """Why images are not read; None if they are. `wanted` is the option `images`."""
    if wanted == "off":
        return "the option images is off"
    if "vision" not in (kind(config) or ""):
        return "this model reads text only"
    if device != "cpu":
        return "images are read on CPUs only so far"
    if format != "safetensors":
        return f"of {format} files only the text part is read"
    if not is_native(config):
        return "its text part runs on transformers' code, which is given tokens only"
    model_type = str(config.get("model_type"))
    if model_type not in SHOWN and wanted != "on":
        return f"models of type {model_type!r} have not been compared with transformers; the option images=on tries it"
    return None
