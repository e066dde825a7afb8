"""The decoder: one implementation, shaped by a DecoderConfig, for all families."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.layers.adapters import AdapterBank
from chairlift.layers.embedding import empty_embedding
from chairlift.layers.formats.base import WeightFormat, head_format
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Build, Linear
from chairlift.layers.parts import Part, present
from chairlift.layers.per_layer_input import PerLayerEmbedding
from chairlift.layers.rope import RotaryEmbedding
from chairlift.layers.rows import softcapped
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig
from chairlift.models.decoder_layer import DecoderLayer, describe_formats
from chairlift.models.programs.base import ModelParts, fuse
from chairlift.models.self_attention import make_norm


class Decoder(Part):
    """Embedding, layers, final norm, head. Built with empty weights, which a `DecoderLoader` fills."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat] = PlainWeight,
        quantize_head: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        """`quantize_head`: store the head in `format`, too, also where the format leaves it plain by default.

        `batch_invariant`: make a token's numbers the same, bit for bit, whatever else is in the same step.
        """
        self.config = config
        self.format, self.quantization = format, format.name
        self.vocab_size, self.hidden_size, self.max_len = config.vocab_size, config.hidden_size, config.max_len
        self.attention_layers, self.recurrent_layers = config.attention_layers, config.recurrent_layers
        self.dtype, self.device = dtype, device
        self.head_format = head_format(format, dtype, device, quantize=quantize_head)  # Draft heads have it, too.
        scale = config.embedding_scale / config.residual_multiplier
        build = Build(dtype, device, format)
        self.embedding = empty_embedding(config.vocab_size, config.hidden_size, scale, build)
        self.layers = [DecoderLayer(config, layer, build) for layer in config.layers]
        ropes = dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None)
        self.rotary = {rope: RotaryEmbedding(rope, dtype=dtype, device=device) for rope in ropes}
        self.per_layer: PerLayerEmbedding | None = None
        if config.per_layer_input_size:
            sizes = config.vocab_size, len(config.layers), config.per_layer_input_size, config.hidden_size
            self.per_layer = PerLayerEmbedding(*sizes, config.norm_eps, build)
        self.norm = make_norm(config, config.hidden_size, config.stream_eps, build)
        # Whether the head multiplies with the embedding table itself.
        self.shares_table = config.tied_head and self.embedding.weight is not None
        if self.embedding.weight is not None and config.tied_head:
            self.head = Linear(self.embedding.weight)
        elif config.tied_head:
            self.head = Linear(self.embedding.table, shared=True, format=self.head_format)
        else:
            of_head = Build(dtype, device, self.head_format)
            self.head = of_head.linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        if batch_invariant:
            self.make_batch_invariant()
        self.mapped_bytes = 0  # This many bytes of weights are mapped from a file.
        self.taps: tuple[int, ...] = ()  # layers whose input `hidden_states` returns as well
        self.adapters = AdapterBank()
        parts = ModelParts(config, self.embedding, self.layers, self.rotary, self.norm, self.per_layer, self.adapters)
        self.program = fuse(parts, format, dtype=dtype, device=device, batch_invariant=batch_invariant)

    @property
    def used_formats(self) -> str:
        """How many linear maps have which format, in words."""
        return describe_formats(self.layers, self.head)

    @property
    def kv_dtype(self) -> torch.dtype:
        linears = (linear for layer in self.layers for linear in layer.linears())
        return next((dtype for linear in linears if (dtype := linear.weight.traits.kv_dtype)), self.dtype)

    @property
    def has_own_threads(self) -> bool:
        return self.program.has_own_threads

    def tap(self, layers: Iterable[int]) -> None:
        """Return the inputs of these layers as well, in addition to those tapped before."""
        self.taps = tuple(sorted({*self.taps, *layers}))

    def first_layers(self, count: int) -> Decoder:
        """A model of the first `count` layers, which shares all weights with this one."""
        model = copy(self)
        model.layers, model.taps, model.program = self.layers[:count], (), self.program.first(count)
        return model

    def parts(self) -> tuple[Part, ...]:
        return (*self.layers, self.norm, self.head, *present(self.per_layer), *self.rotary.values())

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden], the input of the first layer."""
        return self.embedding(tokens)

    def hidden_states(self, batch: StepBatch, attention: StepAttention, rows: Tensor | None = None) -> HiddenStates:
        return self.program(batch, attention, self.taps, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        cap = self.config.logit_softcap
        return logits if cap is None else softcapped(logits, cap)

    def batch_dependence(self) -> list[str]:
        """What may give a token other bits beside other rows of a step on a CPU; empty if nothing does."""
        if self.batch_invariant:
            return []
        reasons = {"products in " + str(self.dtype).removeprefix("torch."): self.dtype is not torch.float32}
        reasons["mixtures of experts"] = any(layer.mixture is not None for layer in self.layers)
        reasons["latent attention"] = any(layer.latent is not None for layer in self.layers)
        reasons["recurrent layers"] = bool(self.recurrent_layers)
        weights = {linear.weight for part in (*self.layers, self.head) for linear in part.linears()}
        formats = sorted({weight.name for weight in weights if not weight.keeps_row_bits})
        reasons[f"products of weights in the format {', '.join(formats)}"] = bool(formats)
        return [reason for reason, applies in reasons.items() if applies]

    def num_weight_bytes(self) -> int:
        parts = sum(part.num_bytes for part in self.parts() if not (self.shares_table and part is self.head))
        return self.embedding.num_bytes + parts

    def num_mapped_bytes(self) -> int:
        return self.mapped_bytes
