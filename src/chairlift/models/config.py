"""The shape of a decoder: everything that differs between the model families, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.recurrent import RecurrentLayer
from chairlift.layers.indexer import IndexShape
from chairlift.layers.latent_attention import LatentShape
from chairlift.layers.recurrent.base import RecurrentShape
from chairlift.layers.rope import Rope
from chairlift.models.experts import ExpertsConfig

# Of queries and keys: of each head, of all heads together, of each head with weights of its own, or without weights.
QKNorm = Literal["head", "full", "each", "unweighted"]


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms in the checkpoint; None where it has no norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORMS = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class PartNames:
    """The names of a decoder's other parts in the checkpoint."""

    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: all three are one tensor
    output: str = "o_proj"
    q_norm: str = "q_norm"  # {} stands for the number of the head if every head has a tensor of its own.
    k_norm: str = "k_norm"
    mlp: str = "mlp"
    inner: tuple[str, ...] = ("gate_proj", "up_proj")  # one name: both are one tensor, or there is no gate
    down: str = "down_proj"
    recurrent: str = "linear_attn"
    final_norm: str = "norm"


LLAMA_NAMES = PartNames()


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer: attention or a recurrent block, both side by side, or neither; then a feed-forward block, or none."""

    attention: AttentionLayer | None
    rope: Rope | None  # None: this layer has no rotation
    intermediate_size: int  # The feed-forward block has it, or each of its experts; 0: there is none
    experts: ExpertsConfig | None = None
    recurrent: RecurrentLayer | None = None  # the states of `mixer`
    mixer: RecurrentShape | None = None
    latent: LatentShape | None = None  # `attention` is latent attention
    index: IndexShape | None = None  # and sparse: this chooses positions
    shares_choice: bool = False  # it attends to the positions that an earlier layer has chosen
    shares_kv: bool = False  # it reads the keys and values of the earlier layer that its attention's index names
    keeps_kv: bool = False  # a later layer reads its keys and values
    values_are_keys: bool = False  # values are the keys before their norm and rotation

    @property
    def only_attention(self) -> AttentionLayer:
        """The attention of a layer that has no recurrent block beside it or in its place."""
        assert self.attention is not None
        assert self.mixer is None
        return self.attention


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """What all models of a family have in common."""

    names: PartNames = LLAMA_NAMES
    norms: NormNames = PRE_NORMS
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_unit_offset: bool = False  # the checkpoint stores norm weights minus one
    qk_norm_after_rope: bool = False
    head_bias: bool = False
    gated_mlp: bool = True  # False: down(activation(up(x))) instead of down(activation(gate(x)) * up(x))
    gated_attention: bool = False  # a gate of its own multiplies each number of the attention's output
    v_norm: bool = False  # values are normalised per head, without a weight
    layer_scalars: bool = False  # the residual stream is multiplied by a stored number behind every layer
    interleaved_rope: bool = False  # the checkpoint pairs neighbouring dimensions of a head instead of its halves


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(DecoderTraits):
    family: str
    vocab_size: int
    hidden_size: int
    max_len: int  # the longest sequence
    layers: tuple[LayerConfig, ...]
    activation: str
    norm_eps: float
    qk_norm: QKNorm | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_head: bool  # the language-model head is the embedding table
    embedding_scale: float
    logit_softcap: float | None
    text_part_only: bool  # the checkpoint also holds parts for images, which are left out
    qkv_clip: float | None = None  # largest size of numbers in queries, keys (both normalised) and values
    parallel_block: bool = False  # attention and feed-forward block read the same residual stream
    attention_output_scale: float = 1.0
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)  # They multiply the gate before its activation, and the output.
    residual_multiplier: float = 1.0  # It multiplies everything that is added to the embeddings.
    logit_scale: float = 1.0
    per_layer_input_size: int = 0  # Every layer has inputs of this size for every token; 0: there are none
    num_mtp_layers: int = 0  # layers behind the last that predict further tokens, which are left out

    @property
    def stream_eps(self) -> float:
        """The norms' eps for a residual stream that is kept divided by `residual_multiplier`.

        Then the outputs of blocks are added as they are: with x = m * y, the sum x + m * f(norm(x)) is
        m * (y + f(norm(x))), and norm(x) with eps is norm(y) with eps / m².
        """
        return self.norm_eps / self.residual_multiplier**2

    @property
    def scales_queries(self) -> bool:
        """Whether some layer scales queries by their position."""
        return any(layer.rope is not None and layer.rope.query_scaling is not None for layer in self.layers)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Those that store keys and values, and then the indexes of sparse attention, which store keys."""
        own = (layer.attention for layer in self.layers if layer.attention is not None and not layer.shares_kv)
        return (*own, *(layer.index.layer for layer in self.layers if layer.index is not None))

    @property
    def has_usual_layers(self) -> bool:
        """Whether layers only add attention and a feed-forward block of their own, as fused kernels expect."""
        shared = any(layer.shares_kv or layer.values_are_keys for layer in self.layers)
        return not (shared or self.v_norm or self.per_layer_input_size or self.layer_scalars)

    @property
    def recurrent_layers(self) -> tuple[RecurrentLayer, ...]:
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def unused_prefixes(self) -> list[str]:
        """Of tensors in the checkpoint: layers behind the last, projections of layers that share their result, and
        indexes that no sequence is long enough for."""
        shared = [index for index, layer in enumerate(self.layers) if layer.shares_kv]
        dense = [index for index, layer in enumerate(self.layers) if layer.latent is not None and layer.index is None]
        unused = [f"layers.{index}.{self.names.attention}.indexer." for index in dense]
        unused += [f"layers.{index}.{self.names.attention}.{name}" for index in shared for name in ("k_", "v_")]
        return unused + [f"layers.{len(self.layers) + index}." for index in range(self.num_mtp_layers)]

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        final = self.hidden_size * (1 + self.norm_bias) + self.vocab_size * self.head_bias
        if self.per_layer_input_size:
            width = len(self.layers) * self.per_layer_input_size
            final += (self.vocab_size + self.hidden_size) * width + self.per_layer_input_size
        return embeddings + final + sum(self._layer_parameters(layer) for layer in self.layers)

    def _layer_parameters(self, layer: LayerConfig) -> int:
        hidden, inner = self.hidden_size, layer.intermediate_size
        count = hidden * len(set(self.layer_norms(layer)) - {None}) * (1 + self.norm_bias)
        if layer.attention is not None and layer.latent is not None:
            count += layer.latent.num_parameters(hidden, layer.attention.num_heads)
            if layer.index is not None:
                assert layer.latent.q_rank is not None
                count += layer.index.num_parameters(hidden, layer.latent.q_rank)
        elif layer.attention is not None:
            count += self._attention_parameters(layer, layer.attention)
        if layer.mixer is not None:
            count += layer.mixer.num_parameters(hidden)
        if self.per_layer_input_size:
            count += hidden * (2 * self.per_layer_input_size + 1)
        count += self.layer_scalars
        if layer.experts is not None:
            return count + layer.experts.num_parameters(hidden, inner)
        into = inner * (1 + self.gated_mlp)
        count += 4 * (self.activation == "xielu")
        return count + (into + inner) * hidden + (into + hidden) * self.mlp_bias * bool(inner)

    def _attention_parameters(self, config: LayerConfig, layer: AttentionLayer) -> int:
        queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        keys = 0 if config.shares_kv else keys
        inputs = queries * (1 + self.gated_attention) + keys * (1 if config.values_are_keys else 2)
        count = self.hidden_size * (inputs + queries + self.output_bias) + inputs * self.qkv_bias
        if self.qk_norm not in (None, "unweighted"):
            per_head = (1 if config.shares_kv else 2) * layer.head_dim * (1 + self.norm_bias)
            count += per_head if self.qk_norm == "head" else queries + keys
        return count + layer.num_heads * layer.sinks

    def layer_norms(self, layer: LayerConfig) -> tuple[str | None, str | None, str | None, str | None]:
        """The names of one layer's norms, as in `NormNames`; a layer without a block has no norms around it."""
        names = self.norms
        mixes = layer.attention is not None or layer.mixer is not None
        around_mixer = (names.before_attention, names.after_attention) if mixes else (None, None)
        return *around_mixer, *((names.before_mlp, names.after_mlp) if layer.intermediate_size else (None, None))
