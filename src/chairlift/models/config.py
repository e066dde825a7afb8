"""The shape of a decoder: everything that differs between the model families, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chairlift.attention.interface import AttentionLayer
from chairlift.layers.recurrent.interface import RecurrentLayer
from chairlift.layers.rope import Rope
from chairlift.models.experts import ExpertsConfig


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms in the checkpoint; None where it has no norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


PRE_NORMS = NormNames("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    attention: AttentionLayer
    rope: Rope | None  # None: this layer has no rotation
    intermediate_size: int  # of the feed-forward block, or of each of its experts
    experts: ExpertsConfig | None = None
    recurrent: RecurrentLayer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    family: str
    vocab_size: int
    hidden_size: int
    max_len: int  # the longest sequence
    layers: tuple[LayerConfig, ...]
    activation: str
    norms: NormNames
    norm_eps: float
    norm_unit_offset: bool  # the checkpoint stores norm weights minus one
    qk_norm: Literal["head", "full"] | None  # queries and keys are normalised per head, or all heads together
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    fused_names: bool  # the checkpoint has qkv_proj and gate_up_proj instead of their parts
    tied_head: bool  # the language-model head is the embedding table
    embedding_scale: float
    logit_softcap: float | None
    text_part_only: bool  # the checkpoint also holds parts for images, which are left out

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer.attention for layer in self.layers)

    @property
    def recurrent_layers(self) -> tuple[RecurrentLayer, ...]:
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return embeddings + self.hidden_size + sum(self._layer_parameters(layer) for layer in self.layers)

    def _layer_parameters(self, layer: LayerConfig) -> int:
        hidden, inner, attention = self.hidden_size, layer.intermediate_size, layer.attention
        queries = attention.num_heads * attention.head_dim
        keys = attention.num_kv_heads * attention.head_dim
        norms = self.norms
        count = hidden * sum(
            name is not None
            for name in (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
        )
        count += hidden * (queries + 2 * keys) + queries * hidden
        count += (
            (queries + 2 * keys) * self.qkv_bias + hidden * self.output_bias + attention.num_heads * attention.sinks
        )
        if self.qk_norm is not None:
            count += queries + keys if self.qk_norm == "full" else 2 * attention.head_dim
        if layer.experts is not None:
            return count + layer.experts.num_parameters(hidden, inner)
        return count + 3 * hidden * inner + (2 * inner + hidden) * self.mlp_bias
