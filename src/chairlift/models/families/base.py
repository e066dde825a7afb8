"""What describes a model family: its differences from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chairlift.layers.rope import QueryScaling
from chairlift.models import recurrent
from chairlift.models.config import LLAMA_NAMES, PRE_NORMS, NormNames, PartNames, QKNorm
from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families import rules
from chairlift.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs from Llama. `defaults` are values that its config files may leave out.

    Where a config switches something on and off, the field of the family is the name of the config's flag.
    """

    title: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()  # flags of its configs: a model with one of them runs on transformers' code
    aliases: Mapping[str, str] = field(default_factory=dict)  # the config's own names of fields -> the usual ones
    names: PartNames = LLAMA_NAMES
    norms: NormNames = PRE_NORMS
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_unit_offset: bool = False
    eps_key: str = "rms_norm_eps"
    qk_norm: QKNorm | None = None
    qk_norm_switch: str | None = None  # `qk_norm` only counts if this flag is true
    qk_norm_after_rope: bool = False
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = "mlp_bias"
    head_bias: bool = False
    gated_mlp: bool = True
    inner_size: Callable[[Fields], int] = rules.intermediate_size  # Dense feed-forward blocks have this size.
    parallel_block: str | bool = False  # then one norm is in front of both blocks
    gated_attention: bool = False
    v_norm: bool = False
    layer_scalars: bool = False
    scaled_embeddings: bool = False
    activation_key: str = "hidden_act"
    # Which layers have the sliding window if the config has one but no list of layer types.
    windowed: Callable[[Fields, int], bool] = rules.every_layer
    window_switch: bool = False  # the window only counts if use_sliding_window is true
    rotated: Callable[[Fields, int, str], bool] = rules.rotated_by_list
    interleaved_rope: bool = False
    scales_local_rope: bool = True  # rope_scaling also counts in layers with a sliding window
    latent: bool = False  # latent attention
    sinks: bool = False  # attention has learned sinks
    chunked: bool = False  # the attention of layers with rotation stays within chunks of attention_chunk_size
    query_scaling: Callable[[Fields], QueryScaling | None] = rules.no_scaling  # Layers without rotation have it.
    experts: ExpertsFamily | None = None
    recurrent: recurrent.RecurrentFamily | None = None

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Family:
        """The family of a table of a .toml file, where rules stand by their names."""
        made = _with_tuples(table)
        for name in ("windowed", "rotated", "inner_size", "query_scaling"):
            if name in table:
                made[name] = getattr(rules, table[name])
        for name, type in (("names", PartNames), ("norms", NormNames)):
            if name in table:
                made[name] = type(**_with_tuples(table[name]))
        if "experts" in table:
            experts = dict(table["experts"])
            names = ExpertNames(**_with_tuples(experts.pop("names", {})))
            own = {"has_experts": getattr(rules, experts.pop("has_experts"))} if "has_experts" in experts else {}
            made["experts"] = ExpertsFamily(names=names, **own, **experts)
        if "recurrent" in table:
            made["recurrent"] = recurrent.RecurrentFamily(
                **{part: getattr(recurrent, rule) for part, rule in table["recurrent"].items()}
            )
        return cls(**made)


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
