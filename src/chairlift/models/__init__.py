"""Models: one decoder described by config, and a fallback for everything else that transformers knows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidParameter, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chairlift.models.base import CausalLM, ModelInfo


def build_model(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int | None = None,
    quantization: str = "none",
    batch_invariant: bool = False,
) -> CausalLM:
    """The model that `config` (a config.json) describes, with its weights from `tensors`, rounded to 8 bits if
    `quantization` is int8 or fp8.

    `tensors` yields (name, tensor) under the names of the checkpoint's safetensors files, in any order; each
    is copied to its place and let go. `max_len` promises that no sequence will be longer; by default the
    model's own limit. `batch_invariant` makes a token's numbers independent of what is computed beside it.
    """
    from chairlift.models.decoder import Decoder
    from chairlift.models.read_config import decoder_config
    from chairlift.models.weights import fill

    if quantization != "none":
        obstacles = {"int8": int8_obstacles, "fp8": fp8_obstacles}[quantization]
        reasons = obstacles(config, dtype, device)
        if reasons:
            raise InvalidParameter("quantization", f"{quantization} is not possible: {'; '.join(reasons)}")
    if not _is_decoder(config):
        from chairlift.models.fallback import load_fallback

        if batch_invariant:
            raise InvalidParameter("batch_invariant", "is not possible: this model runs on transformers' code")
        return load_fallback(config, tensors, dtype=dtype, device=device, max_len=max_len)
    description = decoder_config(config, max_len)
    try:
        model = Decoder(description, dtype=dtype, device=device, quantization=quantization)
    except (RuntimeError, MemoryError) as error:  # torch has no type of its own for this on the CPU
        count, kind = f"{description.num_parameters:,}", str(dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"no memory for the {count} weights of the model in {kind} ({str(error).splitlines()[0]}); "
            "choose a smaller model or dtype"
        ) from error
    if batch_invariant:
        model.make_batch_invariant()
    fill(
        dict(model.targets()),
        tensors,
        text_part_only=description.text_part_only,
        tied=description.tied_head,
        filled_one=model.filled,
    )
    model.finalize()
    return model


def int8_obstacles(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why this model cannot have 8-bit weights there; empty if it can."""
    if not _is_decoder(config):
        return ["this model runs on transformers' code"]
    import torch

    from chairlift.models.read_config import decoder_config

    found = []
    if device.type != "cpu":
        found.append(f"it is for the CPU, not for {device.type}")
    if dtype is not torch.float32:
        found.append(f"activations are float32 with it, not {dtype}")
    if any(layer.experts is not None for layer in decoder_config(config).layers):
        found.append("this model has experts")
    if importlib.util.find_spec("numba") is None:
        found.append("numba is not installed")
    return found


def fp8_obstacles(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why this model cannot have weights in 8-bit floats there; empty if it can."""
    if not _is_decoder(config):
        return ["this model runs on transformers' code"]
    import torch

    from chairlift.layers import fp8
    from chairlift.models.read_config import decoder_config

    found = fp8.fp8_obstacles(device)
    if dtype not in (torch.bfloat16, torch.float16):
        found.append(f"activations are bfloat16 or float16 with it, not {dtype}")
    if any(layer.experts is not None for layer in decoder_config(config).layers):
        found.append("this model has experts")
    return found


def describe(config: Mapping[str, Any], *, max_len: int | None = None) -> ModelInfo:
    """What `config` alone tells: the attention layers, the sizes, the longest sequence."""
    if not _is_decoder(config):
        from chairlift.models.fallback import describe_fallback

        return describe_fallback(config, max_len)
    from chairlift.models.read_config import decoder_config

    return decoder_config(config, max_len)


def supported_families() -> list[str]:
    """The families that run on the decoder of this package, by name."""
    from chairlift.models.families import FAMILIES

    return [family.title for family in FAMILIES.values()]


def _is_decoder(config: Mapping[str, Any]) -> bool:
    from chairlift.models.families import FAMILIES
    from chairlift.models.read_config import text_config

    return str(text_config(config).get("model_type")) in FAMILIES
