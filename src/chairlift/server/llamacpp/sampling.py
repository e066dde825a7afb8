"""The sampling parameters of llama.cpp, which Ollama has too, and their translation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import Integer, StrictModel
from chairlift.server.wire.unknown_fields import say_ignored

RANDOM_SEED = 2**32 - 1  # llama.cpp's number for no seed
INFILL_MIN_P = 0.2  # what the sampler "infill" leaves: tokens of at least this share of the likeliest one

# Samplers that this server does not have, with the values that turn them off.
_MISSING: dict[str, tuple[float, ...]] = {
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "mirostat": (0.0,),
    "dynatemp_range": (0.0,),
    "dry_multiplier": (0.0,),
    "xtc_probability": (0.0,),
    "top_n_sigma": (-1.0, 0.0),
}
# The parameters of each sampler that can be left out of `samplers`, with the values that turn it off.
_NEUTRAL: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
_LETTERS = {"e": "penalties", "k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature", "i": "infill"}
# Prefixes of our parameters, and the names for them here.
NAMES = {
    "repetition_penalty": "repeat_penalty",
    r"max_(completion_)?tokens": "n_predict",
    r"(top_)?logprobs": "n_probs",
    "n": "n_cmpl",
}


def _whole(value: Any) -> Any:
    """Convert a float without a fraction, as clients in other languages write integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[Integer, BeforeValidator(_whole)]


class LlamaSampling(StrictModel):
    """Parameters that llama.cpp and Ollama share. What only tunes a sampler that is off has no effect."""

    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Whole | None = None  # 0 turns the penalties off; otherwise they see the whole context
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Whole | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: Whole | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Whole | None = None
    dry_penalty_last_n: Whole | None = None
    dry_sequence_breakers: Annotated[list[str] | None, Field(fail_fast=True, max_length=64)] = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None

    def sampling(self, location: str = "") -> dict[str, Any]:
        """Return the parameters of a generation request; `location` of these parameters is in errors."""
        place = f"{location}." if location else ""
        for name, off in _MISSING.items():
            if (value := getattr(self, name)) is not None and value not in off:
                problem = f"is not supported: this server has no such sampler; leave it out or set it to {off[0]:g}"
                raise InvalidParameter(f"{place}{name}", problem)
        found: dict[str, Any] = {
            "temperature": None if self.temperature is None else max(self.temperature, 0.0),  # below 0 is greedy
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # all tokens from 0 down
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed == RANDOM_SEED else self.seed,
            "stop": self.stop,
        }
        if self.repeat_last_n == 0:
            found |= _NEUTRAL["penalties"]
        elif self.repeat_last_n is not None:
            say_ignored(f"{place}repeat_last_n")
        return {name: value for name, value in found.items() if value is not None}


def chosen_samplers(samplers: str | list[str] | None) -> dict[str, Any]:
    """Return the parameters that turn off what a list of samplers leaves out; their order has no effect. In place of
    "infill", which favours the ends of likely pieces of code, unlikely tokens are left out."""
    if samplers is None:
        return {}
    names = {_LETTERS.get(one, one) for one in samplers}
    names |= {"penalties"} if "repeat" in names else set()
    off = {name: value for one, values in _NEUTRAL.items() if one not in names for name, value in values.items()}
    return off | ({"min_p": INFILL_MIN_P} if "infill" in names else {})
