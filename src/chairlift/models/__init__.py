"""Models: one decoder described by config, and a fallback for everything else in transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidParameter, UnsupportedModel

if TYPE_CHECKING:
    import torch

    from chairlift.layers.formats.base import WeightFormat
    from chairlift.loading.stored_weight import NamedWeights
    from chairlift.loading.weight_cache.store import WeightCache
    from chairlift.models.base import CausalLM, ModelInfo


log = logging.getLogger("chairlift")


# How the names of classes end that have a head of their own in place of the one for tokens.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
USE_TRANSFORMERS = "chairlift_use_transformers"  # a key of a config: run the model on transformers' code


def choose_implementation(config: dict[str, Any], model_impl: str) -> None:
    """Note in `config` which implementation runs the model: "native", "transformers", or "auto"."""
    if model_impl == "transformers":
        config[USE_TRANSFORMERS] = True
    elif model_impl == "native" and not (is_native(config) or is_encoder(config)):
        problem = f"native is not possible: there is no family {config.get('model_type')!r}"
        raise InvalidParameter("model_impl", f"{problem}; there are {', '.join(supported_families())}")


def build_model(
    config: Mapping[str, Any],
    tensors: NamedWeights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int | None = None,
    quantization: str = "none",
    quantize_head: bool = False,
    batch_invariant: bool = False,
    weight_cache: WeightCache | None = None,
) -> CausalLM:
    """Build the model that `config` (a config.json) describes, with its weights from `tensors`.

    `tensors` yields (name, tensor) under the names of the checkpoint's safetensors files, in any order; each is copied
    and released. `max_len` promises that no sequence will be longer; by default the model's own limit. `quantization`
    is the format of the weights, with `quantize_head` also of the language-model head. `batch_invariant` makes a
    token's numbers independent of the rest of the batch. `weight_cache` has packed weights, which are used instead of
    those of `tensors`, or is given them.
    """
    from chairlift.layers.formats import FORMATS
    from chairlift.loading.stored_weight import dequantized
    from chairlift.models.decoder import Decoder
    from chairlift.models.loader import DecoderLoader
    from chairlift.models.read_config import decoder_config

    reasons = format_obstacles(config, quantization, dtype, device)
    if reasons:
        raise InvalidParameter("quantization", f"{quantization} is not possible: {'; '.join(reasons)}")
    if is_encoder(config):
        from chairlift.models.encoder import load_encoder

        if batch_invariant:
            raise InvalidParameter("batch_invariant", "is not possible: this model is an encoder")
        options: dict[str, Any] = {"dtype": dtype, "device": device, "max_len": max_len}
        return load_encoder(config, dequantized(tensors), **options, format=FORMATS.get(quantization))
    if not is_native(config):
        from chairlift.models.fallback.model import load_fallback

        if batch_invariant:
            raise InvalidParameter("batch_invariant", "is not possible: this model runs on transformers' code")
        format = FORMATS.get(quantization)
        return load_fallback(config, dequantized(tensors), dtype=dtype, device=device, max_len=max_len, format=format)
    description = decoder_config(config, max_len)
    try:
        model = Decoder(
            description,
            dtype=dtype,
            device=device,
            format=FORMATS.get(quantization),
            quantize_head=quantize_head,
            batch_invariant=batch_invariant,
        )
    except (RuntimeError, MemoryError) as error:  # what torch raises on a CPU
        count, type_name = f"{description.num_parameters:,}", str(dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"no memory for the {count} weights of the model in {type_name} ({str(error).splitlines()[0]}); "
            "choose a smaller model or dtype"
        ) from error
    if description.num_mtp_layers:
        log.info(f"layers for multi-token prediction are not loaded: {description.num_mtp_layers}")
    DecoderLoader(model, weight_cache).load(tensors)
    return model


def format_obstacles(
    config: Mapping[str, Any], quantization: str, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Why this model cannot have weights in this format there; empty if it can."""
    from chairlift.layers.formats import FORMATS

    format = FORMATS.get(quantization)
    return model_obstacles(config, format, device.type) or format.obstacles(dtype, device)


def model_obstacles(config: Mapping[str, Any], format: type[WeightFormat], device: str) -> list[str]:
    """Why this model cannot have weights in this format on any `device` of that type; empty if it can."""
    if is_encoder(config):
        return []
    if not is_native(config):
        from chairlift.models.fallback.model import fallback_obstacles

        return fallback_obstacles(config, format, device)
    stores = format.traits.stores_experts or (device == "cpu" and format.traits.expert_blocks is not None)
    return ["this model has experts"] if has_experts(config) and not stores else []


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a model that runs natively has mixtures of experts."""
    from chairlift.models.read_config import decoder_config

    return is_native(config) and any(layer.experts is not None for layer in decoder_config(config).layers)


def rotations(config: Mapping[str, Any], max_len: int | None) -> list[str]:
    """How the layers of a model that runs natively rotate positions, in words: it may depend on the longest
    sequence."""
    from chairlift.models.read_config import decoder_config

    layers = decoder_config(config, max_len).layers if is_native(config) and not is_encoder(config) else ()
    return [repr(layer.rope) for layer in layers]


def describe(config: Mapping[str, Any], *, max_len: int | None = None) -> ModelInfo:
    """What follows from `config` alone: the attention layers, the sizes, the longest sequence."""
    if is_encoder(config):
        from chairlift.models.encoder import encoder_config

        return encoder_config(config, max_len)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith(CLASSIFIERS):
        raise UnsupportedModel(f"{name:.100} classifies texts by a head of its own, which is not supported")
    if not is_native(config):
        from chairlift.models.fallback.model import describe_fallback

        return describe_fallback(config, max_len)
    from chairlift.models.read_config import decoder_config

    return decoder_config(config, max_len)


def supported_families() -> list[str]:
    """The families that run on the decoder of this package, by name."""
    from chairlift.models.families import FAMILIES

    return [family.title for family in FAMILIES.values()]


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether the model is an encoder, which makes vectors of texts and generates nothing."""
    from chairlift.loading import embedding_config

    return embedding_config.is_encoder(config) and not config.get(USE_TRANSFORMERS)


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether the model runs on the decoder of this package; others run on transformers' code, if at all."""
    from chairlift.models.families import find_family
    from chairlift.models.wrappers import text_config

    if config.get(USE_TRANSFORMERS):
        return False
    inner = text_config(config)
    family = find_family(inner.get("model_type"))
    return family is not None and not any(inner.get(flag) for flag in family.lacks)
