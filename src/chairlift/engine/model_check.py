"""What can be said about a model before its weights are loaded: whether and how it runs, and the memory it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chairlift.engine.memory_plan import bytes_per_token
from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.none import PlainWeight
from chairlift.loading.embedding_config import lacks_head, num_labels
from chairlift.loading.resolve import ModelConfig, read_model_config
from chairlift.loading.safetensors_checkpoint import quantized_reader
from chairlift.models import describe, is_encoder, is_native, model_obstacles
from chairlift.models.weight_sizes import microscaled_bytes, weight_bytes
from chairlift.models.wrappers import hinted_kind, kind, text_config, text_part_notice
from chairlift.vision.model_images import ImagesCheck, check_reading

NATIVE, FALLBACK, REFUSED = "native", "fallback", "refused"
PLAIN_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICE_TYPES = {"cpu": ("float32", "CPU"), "cuda": ("bfloat16", "GPU")}  # the type of the rest, and its usual name
PLAIN_DEVICES = dict(DEVICE_TYPES.values())


@dataclass(frozen=True, slots=True)
class FormatCheck:
    """A weight format for a model: the memory of all weights where it is possible, or the reason why it is not."""

    device: str  # "CPU" or "GPU"
    weight_bytes: int | None = None
    obstacles: tuple[str, ...] = ()
    cpu_weight_bytes: int | None = None  # On a CPU, of a format that is for both devices.


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The answer of `chairlift models --check`."""

    model: str
    model_type: str
    path: str  # NATIVE, FALLBACK or REFUSED
    reason: str | None = None  # why it is refused
    note: str | None = None  # what else it is than a language model
    num_parameters: int = 0
    max_model_len: int = 0
    stored: str | None = None  # what its checkpoint is quantized by, in words
    stored_bytes: int | None = None  # the size of the checkpoint's files, where they are here
    tokenizer: str | None = None  # The tokenizer of a GGUF file, in words.
    weight_bytes: Mapping[str, int] = field(default_factory=dict)  # not quantized, by type
    formats: Mapping[str, FormatCheck] = field(default_factory=dict)
    kv_bytes_per_token: Mapping[str, int] = field(default_factory=dict)  # The keys are types.
    state_bytes_per_sequence: int = 0  # the states of recurrent layers
    images: ImagesCheck | None = None  # what reading them takes, of a model with a vision part


def check_model(name: str) -> ModelCheck:
    """Check a folder, a config.json, a GGUF file, a known model or an id of the Hugging Face hub; loads no weights."""
    try:
        found = read_model_config(name)
    except (UnsupportedModel, CorruptCheckpoint) as refusal:
        return ModelCheck(name, "unknown", REFUSED, _reason(refusal))
    model_type, whole = str(found.config.get("model_type", "unknown")), None
    try:
        whole = kind(found.config) or hinted_kind(found.config)
        model_type = str(text_config(found.config).get("model_type", "unknown"))
        checked = _check(name, model_type, found)
    except (UnsupportedModel, CorruptCheckpoint) as refusal:
        what = f"{whole}, whose text part cannot run: " if whole else ""
        reasons = [what + _reason(refusal), *filter(None, [found.problem])]
        return ModelCheck(
            name, model_type, REFUSED, "; ".join(reasons), stored=found.quantization, stored_bytes=found.num_bytes
        )
    return checked if found.problem is None else replace(checked, path=REFUSED, reason=found.problem)


def _check(name: str, model_type: str, found: ModelConfig) -> ModelCheck:
    config, images = found.config, check_reading(found.config, found.folder)
    reads = images is not None and images.obstacle is None
    notes = [kind(config) if reads else text_part_notice(config)]
    if is_encoder(config):
        notes.append("encoder: it only makes embeddings" if num_labels(config) is None else "classifier of texts")
    elif lacks_head(config.get("architectures")):
        config = config | {"tie_word_embeddings": True}  # then there are no weights of a head
        notes.append("it has no language-model head: it only makes embeddings")
    info = describe(config)
    return ModelCheck(
        name,
        model_type,
        NATIVE if is_native(config) or is_encoder(config) else FALLBACK,
        note="; ".join(filter(None, notes)) or None,
        num_parameters=info.num_parameters,
        max_model_len=info.max_len,
        stored=found.quantization,
        stored_bytes=found.num_bytes,
        tokenizer=found.tokenizer,
        weight_bytes={
            kind: weight_bytes(config, PlainWeight, dtype, "cpu" if kind == "float32" else "cuda")
            for kind, dtype in PLAIN_TYPES.items()
        },
        formats=_formats(config, found),
        kv_bytes_per_token={kind: bytes_per_token(info.attention_layers, dtype) for kind, dtype in PLAIN_TYPES.items()},
        state_bytes_per_sequence=sum(layer.num_bytes for layer in info.recurrent_layers),
        images=images,
    )


def _formats(config: Mapping[str, Any], found: ModelConfig) -> dict[str, FormatCheck]:
    checks = {}
    for name in FORMATS.names():
        format = FORMATS.get(name)
        if name in ("none", "checkpoint"):
            continue
        device = format.traits.devices[-1]
        kind, title = DEVICE_TYPES[device]
        obstacles = tuple(model_obstacles(config, format, device))
        size = None if obstacles else weight_bytes(config, format, PLAIN_TYPES[kind], device)
        on_cpu = None
        if format.traits.devices[:-1] and not model_obstacles(config, format, "cpu"):
            on_cpu = weight_bytes(config, format, torch.float32, "cpu")
        checks[name] = FormatCheck(title, size, obstacles, on_cpu)
    if found.problem is None and is_native(config) and getattr(quantized_reader(config), "name", None) == "mxfp4":
        checks["checkpoint"] = FormatCheck("GPU", microscaled_bytes(config, torch.bfloat16))
    return checks


def _reason(refusal: UnsupportedModel | CorruptCheckpoint) -> str:
    return " ".join(str(refusal).partition(". Supported:")[0].split())
