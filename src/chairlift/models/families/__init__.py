"""The model families: one file of differences from Llama for each kind of them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from chairlift.layers.rope import QueryScaling
from chairlift.models import recurrent
from chairlift.models.config import DecoderTraits, NormNames, PartNames, QKNorm
from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families import rules
from chairlift.models.fields import Fields
from chairlift.registry import load_plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(DecoderTraits):
    """How a family differs from Llama. `defaults` are values that its config files may leave out.

    Where a config switches something on and off, the field of the family is the name of the config's flag.
    """

    title: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()  # flags of its configs: a model with one of them runs on transformers' code
    aliases: Mapping[str, str] = field(default_factory=dict)  # the config's own names of fields -> the usual ones
    eps_key: str = "rms_norm_eps"
    qk_norm: QKNorm | None = None
    qk_norm_switch: str | None = None  # `qk_norm` only counts if this flag is true
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = "mlp_bias"
    inner_size: Callable[[Fields], int] = rules.INNER_SIZE[
        "intermediate_size"
    ]  # Dense feed-forward blocks have this size.
    parallel_block: str | bool = False  # then one norm is in front of both blocks
    scaled_embeddings: bool = False
    activation_key: str = "hidden_act"
    # Which layers have the sliding window if the config has one but no list of layer types.
    windowed: Callable[[Fields, int], bool] = rules.WINDOWED["every_layer"]
    window_switch: bool = False  # the window only counts if use_sliding_window is true
    rotated: Callable[[Fields, int, str], bool] = rules.rotated_by_list
    scales_local_rope: bool = True  # rope_scaling also counts in layers with a sliding window
    latent: bool = False  # latent attention
    sparse: bool = False  # and a small attention chooses the positions that it reads
    sinks: bool = False  # attention has learned sinks
    chunked: bool = False  # the attention of layers with rotation stays within chunks of attention_chunk_size
    # Layers without rotation have it.
    query_scaling: Callable[[Fields], QueryScaling | None] = lambda fields: None
    experts: ExpertsFamily | None = None
    recurrent: recurrent.RecurrentFamily | None = None

    def __post_init__(self) -> None:
        for name, type in (("names", PartNames), ("norms", NormNames)):
            if not isinstance(getattr(self, name), type):
                raise TypeError(f"{name} of a family must be {type.__name__}(…), got {getattr(self, name)!r}")
        for name, choices in (("norm_kind", ("rms", "layer")), ("qk_norm", (None, *get_args(QKNorm)))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} of a family must be one of {choices}, got {getattr(self, name)!r}")
        for name in rules.BY_FIELD:
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} of a family must be a function, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Family:
        """The family of a table of a .toml file, where rules stand by their names."""
        made = _with_tuples(table)
        for name, known in rules.BY_FIELD.items():
            if name in table:
                made[name] = known[table[name]]
        for name, type in (("names", PartNames), ("norms", NormNames)):
            if name in table:
                made[name] = type(**_with_tuples(table[name]))
        if "experts" in table:
            experts = dict(table["experts"])
            names = ExpertNames(**_with_tuples(experts.pop("names", {})))
            if "has_experts" in experts:
                experts["has_experts"] = rules.HAS_EXPERTS[experts["has_experts"]]
            made["experts"] = ExpertsFamily(names=names, **experts)
        if "recurrent" in table:
            made["recurrent"] = recurrent.RecurrentFamily(
                **{part: getattr(recurrent, rule) for part, rule in table["recurrent"].items()}
            )
        return cls(**made)


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


__all__ = ["FAMILIES", "Family", "find_family"]

# By the model_type of config.json. A plugin adds its own: FAMILIES["name"] = Family(...).
FAMILIES: dict[str, Family] = {}
# Families that only exist as the text part of a larger model.
TEXT_PARTS: dict[str, Family] = {}
# Model types that are another name of a family: transformers does not have them, or not as language models.
SAME_AS: dict[str, str] = {}


def find_family(model_type: object) -> Family | None:
    """The family of this name, also from plugins."""
    load_plugins()
    name = SAME_AS.get(str(model_type), str(model_type))
    return FAMILIES.get(name) or TEXT_PARTS.get(name)


def _read(path: Path) -> None:
    """Add the families of a file. A table may be `like` an earlier one; what only others are like has a name with _."""
    tables = tomllib.loads(path.read_text())
    SAME_AS.update(tables.pop("same_as", {}))
    for name, table in tables.items():
        if "like" in table:
            tables[name] = table = _merged(tables[table.pop("like")], table)
        if not name.startswith("_"):
            own = {key: value for key, value in table.items() if key != "text_part"}
            (TEXT_PARTS if "text_part" in table else FAMILIES)[name] = Family.of(own)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both, and in tables that both have those of both; `own` counts."""
    both = {name: _merged(base[name], own[name]) for name in base.keys() & own.keys() if isinstance(own[name], dict)}
    return {**base, **own, **both}


for _path in sorted(Path(__file__).parent.glob("*.toml")):
    _read(_path)
