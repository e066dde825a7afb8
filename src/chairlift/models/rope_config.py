"""The frequencies of rotary position embeddings (RoPE), from the rope settings of a config.json.

All arithmetic is done on float32 tensors in the order that transformers uses: at position 100,000 the last bit of a
frequency is already a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.layers.rope import QueryScaling, Rope
from chairlift.models.fields import LARGEST, MAX_SIZE, SMALLEST, Fields

ROPE_SETTINGS = "the rope settings in config.json"


def rope_parameters(config: Fields, layer_type: str, *, scales_local: bool = True) -> Mapping[str, Any]:
    """One layer type's rope settings, from either style of config.

    Old: `rope_theta` and friends at the top and a `rope_scaling` object. New: one `rope_parameters` object,
    possibly one per layer type. Gemma 3's old style has a second base for its local layers, which ignore the
    scaling. Without `scales_local`, other families' local layers ignore it, too.
    """
    settings = dict(config.section("rope_parameters"))
    if any(isinstance(value, Mapping) for value in settings.values()):
        settings = dict(Fields(settings, {}, ROPE_SETTINGS).section(layer_type))
    elif layer_type == "sliding_attention" and "rope_local_base_freq" in config:
        settings = {"rope_theta": config.raw("rope_local_base_freq")}
    elif scales_local or layer_type != "sliding_attention":
        settings |= config.section("rope_scaling")
    for name in ("rope_theta", "partial_rotary_factor"):
        if settings.get(name) is None and name in config:
            settings[name] = config.raw(name)
    if settings.get("partial_rotary_factor") is None and "rotary_dim" in config and "head_dim" in config:
        settings["partial_rotary_factor"] = config.integer("rotary_dim") / config.integer("head_dim")
    if "original_max_position_embeddings" in config:  # The top one counts if both places name it (Phi-3).
        settings["original_max_position_embeddings"] = config.raw("original_max_position_embeddings")
    return settings


def make_rope(parameters: Mapping[str, Any], *, head_dim: int, max_positions: int, max_len: int) -> Rope:
    """The rope that `parameters` describe.

    `max_positions` is the config's `max_position_embeddings`, `max_len` the longest sequence that will run.
    """
    fields = Fields(
        parameters,
        {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0, "original_max_position_embeddings": max_positions},
        ROPE_SETTINGS,
    )
    rope_type = _rope_type(fields)
    if rope_type not in _SCALINGS:
        raise UnsupportedModel(f"rope type {rope_type!r} is not supported; supported: {', '.join(_SCALINGS)}")
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * fields.number("partial_rotary_factor"))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CorruptCheckpoint(
            f"{ROPE_SETTINGS}: an even number of the head's {head_dim} dimensions must be rotated, not {rotary_dim}"
        )
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    theta = fields.number("rope_theta")
    if theta <= 1:
        raise CorruptCheckpoint(f"{ROPE_SETTINGS}: rope_theta must be above 1, got {theta:g}")
    pos_freqs = theta**exponents  # positions per radian; the name is that of transformers
    inv_freq, scale = _SCALINGS[rope_type](fields, pos_freqs, max_positions, max_len)
    beta, length = fields.optional_number("llama_4_scaling_beta"), fields.integer("original_max_position_embeddings")
    scales = beta is not None and max_len > length  # else no sequence is long enough for it
    return Rope(tuple(inv_freq.tolist()), scale, QueryScaling(beta, length) if beta is not None and scales else None)


def scaled_length(parameters: Mapping[str, Any], max_positions: int) -> int:
    """The longest context the model is meant for.

    `max_position_embeddings` usually includes the scaling. Yarn configs often have the trained length there, to be
    multiplied by the factor.
    """
    fields = Fields(parameters, {}, ROPE_SETTINGS)
    if _rope_type(fields) != "yarn" or "factor" not in fields or "original_max_position_embeddings" not in fields:
        return max_positions
    return max(max_positions, min(int(_original_len(fields) * fields.number("factor")), MAX_SIZE))


def _rope_type(fields: Fields) -> str:
    rope_type = str(fields.raw("rope_type") or fields.raw("type") or "default")
    if rope_type == "mrope":  # positions in several directions, which are the same in text
        return "default"
    # The first Phi-3 configs called longrope "su", and later ones "yarn".
    return "longrope" if rope_type == "su" or (rope_type == "yarn" and "short_factor" in fields) else rope_type


def _original_len(fields: Fields) -> int:
    """The context length the model was trained with, before any scaling."""
    return fields.integer("original_max_position_embeddings", low=2)


_Scaled = tuple[Tensor, float]  # inverse frequencies, and the factor of cos and sin


def _dynamic(fields: Fields, pos_freqs: Tensor, max_positions: int, max_len: int) -> _Scaled:
    """Hunyuan's fixed `alpha` enlarges the base.

    Without it: unscaled up to `max_position_embeddings`, which is also the longest sequence allowed. Beyond it this
    scheme changes all frequencies with every token, and keys in the cache would be wrong.
    """
    alpha, size = fields.optional_number("alpha"), 2 * len(pos_freqs)
    if alpha is not None and size > 2:
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return 1.0 / (fields.number("rope_theta") * alpha ** (size / (size - 2))) ** exponents, 1.0
    return 1.0 / pos_freqs, 1.0


def _proportional(fields: Fields, pos_freqs: Tensor, max_positions: int, max_len: int) -> _Scaled:
    """The pairs of the whole head, of which only the first are rotated."""
    inv_freq = 1.0 / pos_freqs / (fields.optional_number("factor") or 1.0)
    inv_freq[int(fields.number("partial_rotary_factor") * len(pos_freqs)) :] = 0.0
    return inv_freq, 1.0


def _llama3(fields: Fields, pos_freqs: Tensor, max_positions: int, max_len: int) -> _Scaled:
    """Keep high frequencies, divide low ones by the factor, and interpolate between."""
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    original = _original_len(fields)
    if high < low:
        raise CorruptCheckpoint(f"{ROPE_SETTINGS}: high_freq_factor must not be below low_freq_factor")
    inv_freq = 1.0 / pos_freqs
    turns = original / (2 * math.pi / inv_freq)  # full turns of each pair within the trained context
    # Where both factors are the same (Llama 4 Scout), nothing lies between.
    blend = (turns >= low).float() if high == low else ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / factor + blend * inv_freq, 1.0


def _yarn(fields: Fields, pos_freqs: Tensor, max_positions: int, max_len: int) -> _Scaled:
    """Like llama3, but interpolating linearly over pairs instead of over frequencies."""
    original = _original_len(fields)
    factor = fields.optional_number("factor") or max_positions / original
    pairs, theta = len(pos_freqs), fields.number("rope_theta")

    def pair_with_turns(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = pair_with_turns(fields.optional_number("beta_fast") or 32.0)
    last = pair_with_turns(fields.optional_number("beta_slow") or 1.0)
    if fields.raw("truncate") is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp  # the share of each unscaled frequency
    inv_freq = 1.0 / (factor * pos_freqs) * (1 - kept) + 1.0 / pos_freqs * kept
    return inv_freq, _yarn_scale(fields, factor)


def _yarn_scale(fields: Fields, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    stated = fields.optional_number("attention_factor")
    if stated is not None:
        return stated
    if fields.raw("mscale") and fields.raw("mscale_all_dim"):
        return magnitude(fields.number("mscale")) / magnitude(fields.number("mscale_all_dim"))
    return magnitude(1.0)


def _longrope(fields: Fields, pos_freqs: Tensor, max_positions: int, max_len: int) -> _Scaled:
    """Divide by one factor per pair, from a list for short or one for long contexts.

    transformers picks the list anew for every call, by the longest sequence in it. A cached key cannot change
    its rotation, nor may one request change another's, so the choice is made once: the long list if any
    sequence may pass the trained length. Run with a smaller `max_len` to get the short list.
    """
    original = _original_len(fields)
    name = "long_factor" if max_len > original else "short_factor"
    factor = fields.optional_number("factor") or max_positions / original
    scale = fields.optional_number("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (_factor_list(fields, name, len(pos_freqs)) * pos_freqs), scale


def _factor_list(fields: Fields, name: str, length: int) -> Tensor:
    factors = fields.items(name, (int, float), length=length)
    if not all(SMALLEST <= factor <= LARGEST for factor in factors):
        raise CorruptCheckpoint(f"{ROPE_SETTINGS}: {name} must hold finite numbers above 0")
    return torch.tensor(factors, dtype=torch.float32)


_SCALINGS: dict[str, Callable[[Fields, Tensor, int, int], _Scaled]] = {
    "default": lambda fields, pos_freqs, *_: (1.0 / pos_freqs, 1.0),
    "linear": lambda fields, pos_freqs, *_: (1.0 / pos_freqs / fields.number("factor"), 1.0),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    # GGUF files hold the result of a scaling, one factor per pair, not its parameters.
    "frequency_factors": lambda fields, pos_freqs, *_: (
        1.0 / pos_freqs / _factor_list(fields, "factors", len(pos_freqs)),
        fields.optional_number("attention_factor") or 1.0,
    ),
}
