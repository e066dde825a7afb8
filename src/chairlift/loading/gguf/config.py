"""GGUF metadata as the `config.json` that Hugging Face would have written for the same model.

What GGUF leaves out because its own runtime hard-codes it (activation, layer pattern, attention scale) is in
families.toml. RoPE settings use the `rope_theta` / `rope_scaling` spelling. One `rope_type` is our own:
`frequency_factors`, whose `factors` [rotary_dim / 2] divide the inverse frequencies.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.file import GGUFFile, corrupt
from chairlift.loading.gguf.metadata import Metadata, token_id

Config = dict[str, Any]

# End-of-turn and end-of-document tokens of common formats. Many files declare only one as eos, but a chat model may
# end with either.
_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
)
_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})  # gpt-oss ends so; its <|end|> only ends a message.
_CONTROL = 3  # token type
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """A table of families.toml, which explains the fields."""

    architectures: tuple[str, ...]
    class_name: str
    when: str | None = None
    when_not_zero: str | None = None
    rotates_neighbours: bool = False
    norm_offset: float = 0.0
    names: Mapping[str, str]
    whole_names: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def describes(self, model: Metadata) -> bool:
        """Whether a file of one of its architectures is of this family."""
        if self.when_not_zero is not None:
            return model.integer(self.when_not_zero, 0, least=0) > 0
        return self.when is None or model.has(self.when)


@cache
def families() -> dict[str, GGUFFamily]:
    """The families by their model_type."""
    tables = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
    groups, made = tables.pop("_names"), {}
    for model_type, table in tables.items():
        names = {kind: name for group in table.pop("names") for kind, name in groups[group].items()}
        names |= table.pop("own", {})
        architectures, class_name = tuple(table.pop("architectures")), table.pop("class")
        made[model_type] = GGUFFamily(architectures=architectures, class_name=class_name, names=names, **table)
    return made


def hf_config(file: GGUFFile) -> Config:
    everything = Metadata(file)
    architecture = everything.string("general.architecture")
    candidates = {name: family for name, family in families().items() if architecture in family.architectures}
    if not candidates:
        supported = sorted({name for family in families().values() for name in family.architectures})
        raise UnsupportedModel(
            f"{file.path}: the GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(supported)}"
        )
    if everything.integer("split.count", 1) != 1:
        raise UnsupportedModel(
            f"{file.path}: is one part of a split GGUF; merge the parts with `llama-gguf-split --merge` first"
        )
    model = everything.below(f"{architecture}.")
    config = _common(model)
    model_type, family = next((name, each) for name, each in candidates.items() if each.describes(model))
    if family.rotates_neighbours and "partial_rotary_factor" in config:
        raise UnsupportedModel(f"{file.path}: RoPE over a part of each head is not supported here")
    config |= {"model_type": model_type, "architectures": [family.class_name]}
    for name, entry in family.config.items():
        config[name] = _read_entry(model, config, entry) if isinstance(entry, dict) else entry
    return config | _token_ids(everything)


def hf_generation_config(file: GGUFFile) -> Config:
    """The generation config: recommended sampling, bos and eos ids; `eos_token_id` lists every id that ends a text."""
    metadata = Metadata(file)
    tokens = metadata.strings("tokenizer.ggml.tokens") or []
    types = metadata.numbers("tokenizer.ggml.token_type")
    ends = [token_id(metadata, kind) for kind in ("eos", "eot", "eom")]
    if types is not None:
        control = np.flatnonzero(types[: len(tokens)] == _CONTROL)
        special = {tokens[index]: int(index) for index in control}
        is_harmony = special.keys() >= _HARMONY_ENDS
        ends += [special[token] for token in (_ENDS | _HARMONY_ENDS if is_harmony else _ENDS) if token in special]
        ends = [end for end in ends if not (is_harmony and end == special.get("<|end|>"))]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    given = metadata.below("general.sampling.")
    sampling = {name: given.value(key) for name, key in _SAMPLING_KEYS.items()}
    # Floats of 32 bits are rounded to the decimals that were written.
    sampling = {name: round(value, 6) if isinstance(value, float) else value for name, value in sampling.items()}
    values = _token_ids(metadata) | {"eos_token_id": eos or None} | sampling
    return {name: value for name, value in values.items() if value is not None}


def _token_ids(metadata: Metadata) -> dict[str, int | None]:
    """Special token ids, None if absent: a missing key would select the family's default id of another vocabulary."""
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: token_id(metadata, kind) for name, kind in ids.items()}


def _common(model: Metadata) -> Config:
    tensors = model.file.tensors
    num_layers = _num_layers(model)
    hidden_size = model.integer("embedding_length")
    num_heads = model.integer("attention.head_count")
    head_dim = model.integer("attention.key_length", max(1, hidden_size // num_heads))
    if model.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{model.file.path}: keys and values of different sizes are not supported")
    rotary_dim = model.integer("rope.dimension_count", head_dim)
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        corrupt(model.file.path, "the tensor 'token_embd.weight' is missing or not a matrix")
    num_tokens = len(model.below("tokenizer.ggml.").strings("tokens") or ())
    if num_tokens > embeddings.shape[0]:
        corrupt(model.file.path, f"it has {num_tokens} tokens and embeddings for {embeddings.shape[0]}")
    layer_eps = "attention.layer_norm_epsilon"  # Files of models with layer norms have it.
    config = {
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": model.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": model.integer("context_length"),
        "rms_norm_eps": model.number(layer_eps if model.has(layer_eps) else "attention.layer_norm_rms_epsilon"),
        "rope_theta": model.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(model, rotary_dim),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    return config


def _num_layers(model: Metadata) -> int:
    num_layers = model.integer("block_count")
    blocks = {name.split(".")[1] for name in model.file.tensors if name.startswith("blk.")}
    if len(blocks) != num_layers or not all(str(layer) in blocks for layer in range(num_layers)):
        corrupt(model.file.path, f"it claims {num_layers} layers and has tensors of {len(blocks)}")
    return num_layers


# ---- how families.toml says that a field is read ---------------------------------------------------------------------


def _read_entry(model: Metadata, config: Config, entry: Mapping[str, Any]) -> Any:
    """The value of an entry such as { integer = KEY, default = 6 }; a default may be another field."""
    (kind, argument), *options = entry.items()
    more = {name: config[value] if isinstance(value, str) else value for name, value in options}
    return _READERS[kind](model, config, argument, **more)


def _full_every(model: Metadata, config: Config, every: int | str) -> list[str]:
    """Every nth layer sees the whole text, if the others have a window."""
    every = config[every] if isinstance(every, str) else every
    windowed = bool(config["sliding_window"])
    return _layer_types([windowed and (i + 1) % every != 0 for i in range(config["num_hidden_layers"])])


def _sliding_by(model: Metadata, config: Config, key: str) -> list[str]:
    slides = model.numbers(key)
    if slides is None or len(slides) != config["num_hidden_layers"]:
        corrupt(model.file.path, f"{model.prefix}{key} must have one entry per layer")
    return _layer_types(slides.tolist())


def _layer_types(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _query_scalar(model: Metadata, config: Config, widest: int) -> int:
    """Gemma's 27B models, of `widest` layers, scale their queries by another width."""
    is_widest = config["num_hidden_layers"] == widest
    return int(config["hidden_size"] // config["num_attention_heads"] if is_widest else config["head_dim"])


_READERS: dict[str, Callable[..., Any]] = {
    "integer": lambda model, config, key, default=None: model.integer(key, default),
    "number": lambda model, config, key, default=None: model.number(key, default),
    "optional_number": lambda model, config, key: model.number(key) if model.has(key) else None,
    "has_tensor": lambda model, config, name: name in model.file.tensors,
    "same_as": lambda model, config, name: config[name],
    "if_windowed": lambda model, config, value: value if config["sliding_window"] else None,
    "window": lambda model, config, key: model.integer(key, 0, least=0) or None,
    "full_every": _full_every,
    "sliding_by": _sliding_by,
    # 1: the layer rotates, 0: it does not (the field's name is Hugging Face's)
    "rotated_but_every": lambda model, config, every: [
        int((layer + 1) % every != 0) for layer in range(config["num_hidden_layers"])
    ],
    "query_scalar": _query_scalar,
    # A scaling of RoPE that is not rounded to whole pairs, which files do not say.
    "untruncated": lambda model, config, name: (
        (config[name] or {"rope_type": "default"}) | ({} if config[name] is None else {"truncate": False})
    ),
}


# ---- RoPE ------------------------------------------------------------------------------------------------------------


def rope_scaling(model: Metadata, rotary_dim: int) -> dict[str, Any] | None:
    tensors = model.file.tensors
    if "rope_freqs.weight" in tensors:
        return _named_or_explicit(model, _factors(model, "rope_freqs.weight", rotary_dim))
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(model, "rope_factors_long.weight", rotary_dim),
            "short_factor": _factors(model, "rope_factors_short.weight", rotary_dim),
            "original_max_position_embeddings": model.integer("rope.scaling.original_context_length"),
        }
    kind = model.string("rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{model.file.path}: the RoPE scaling {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": model.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = model.integer("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if model.has(f"rope.scaling.yarn_{key}"):
                scaling[key] = model.number(f"rope.scaling.yarn_{key}")
    return scaling


def _named_or_explicit(model: Metadata, factors: list[float]) -> dict[str, Any] | None:
    """Recover Llama 3's rope scaling, of which GGUF stores only one divisor per frequency.

    Every Llama 3.x so far has the same bounds and another factor; if those bounds reproduce the stored divisors, the
    scaling gets its name back. Otherwise the divisors are used as they are.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": model.integer("rope.scaling.original_context_length", 8192),
    }
    theta = model.number("rope.freq_base", 10000.0)
    if np.allclose(factors, _llama3_factors(scaling, theta, len(factors))):
        return scaling
    return {"rope_type": "frequency_factors", "factors": factors}


def _llama3_factors(scaling: dict[str, Any], theta: float, count: int) -> NDArray[np.float64]:
    inv_freq = theta ** -(np.arange(count) / count)
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: a high frequency, unchanged
    factors: NDArray[np.float64] = 1.0 / (kept + (1.0 - kept) / scaling["factor"])
    return factors


def _factors(model: Metadata, name: str, rotary_dim: int) -> list[float]:
    tensor = model.file.tensors[name]
    if tensor.shape != (rotary_dim // 2,):
        corrupt(model.file.path, f"{name} has the shape {tensor.shape} where {rotary_dim // 2} are needed")
    factors = model.file.read(tensor)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        corrupt(model.file.path, f"{name} must hold positive numbers")
    return [float(str(factor)) for factor in factors]
