"""Encoders of the BERT family on the ragged batch: attention in both directions within each text, and no cache.

A step has whole texts only (`runner/encoder.py`), so that keys and values are needed in no later step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.recurrent import RecurrentLayer
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.layers.formats.base import WeightFormat, count_formats
from chairlift.layers.linear import Build
from chairlift.layers.mlp import ACTIVATIONS
from chairlift.layers.norm import LayerNorm
from chairlift.layers.parts import Part, Targets, add_prefix, present
from chairlift.loading.embedding_config import num_labels
from chairlift.loading.stored_weight import NamedWeights
from chairlift.models.base import HiddenStates
from chairlift.models.fields import MAX_LAYERS, Fields

# Model types whose positions begin behind the padding token, and whose classifiers have a layer of their own.
ROBERTA = ("roberta", "xlm-roberta", "camembert")
SEPARATOR = "chairlift_separator"  # a key of a config: the token between two texts
_PREFIX = re.compile(r"(bert|roberta)\.")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder; also what follows from it without weights."""

    family: str
    vocab_size: int
    hidden_size: int
    max_len: int
    num_layers: int
    num_heads: int
    inner_size: int
    activation: str
    eps: float
    token_types: int
    positions: int  # rows of the table
    first_position: int
    separator: int | None  # Tokens behind the first of these are of the second type.
    num_labels: int | None  # None: it has no classifier.

    attention_layers: tuple[AttentionLayer, ...] = ()
    recurrent_layers: tuple[RecurrentLayer, ...] = ()
    has_experts = False
    num_shared_parameters = 0

    @cached_property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of the linear maps of all layers."""
        size, inner = self.hidden_size, self.inner_size
        return ((3 * size, size), (size, size), (inner, size), (size, inner)) * self.num_layers

    @property
    def num_parameters(self) -> int:
        size = self.hidden_size
        tables = (self.vocab_size + self.positions + self.token_types + 2) * size
        layer = sum(out * (width + 1) for out, width in self.linear_shapes) + 4 * size * self.num_layers
        head = 0 if self.num_labels is None else size * (size + 1) + self.num_labels * (size + 1)
        return tables + layer + head


def encoder_config(config: Mapping[str, Any], max_len: int | None = None) -> EncoderConfig:
    """Read the config.json of an encoder; `max_len` promises that no text will be longer."""
    fields = Fields(dict(config), {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 0}, "config.json")
    family = fields.text("model_type")
    if fields.raw("position_embedding_type") not in (None, "absolute"):
        raise UnsupportedModel("position_embedding_type: only absolute positions are supported")
    activation = fields.text("hidden_act")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r:.60} is not supported; supported: {', '.join(ACTIVATIONS)}")
    size, heads = fields.integer("hidden_size", high=2**16), fields.integer("num_attention_heads", high=2**12)
    if size % heads:
        raise UnsupportedModel(f"hidden_size ({size}) must be a multiple of num_attention_heads ({heads})")
    positions = fields.integer("max_position_embeddings", high=2**20)
    first = fields.integer("pad_token_id", low=0) + 1 if family in ROBERTA else 0
    limit = positions - first
    if max_len is not None and not 1 <= max_len <= limit:
        raise InvalidParameter("max_model_len", f"must be between 1 and the model's {limit}, got {max_len}")
    return EncoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=size,
        max_len=limit if max_len is None else max_len,
        num_layers=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        num_heads=heads,
        inner_size=fields.integer("intermediate_size", high=2**18),
        activation=activation,
        eps=fields.number("layer_norm_eps"),
        token_types=fields.optional_integer("type_vocab_size") or 1,
        positions=positions,
        first_position=first,
        separator=fields.optional_integer(SEPARATOR, low=0),
        num_labels=num_labels(config),
    )


class EncoderLayer(Part):
    """Attention and a feed-forward block, each followed by its sum with the rows before it and a norm."""

    def __init__(self, config: EncoderConfig, build: Build) -> None:
        size, inner = config.hidden_size, config.inner_size
        self.num_heads = config.num_heads
        self.qkv = build.linear(size, 3 * size, bias=True)
        self.output = build.linear(size, size, bias=True)
        self.up = build.linear(size, inner, bias=True)
        self.down = build.linear(inner, size, bias=True)
        self.after_attention = LayerNorm(size, config.eps, build, bias=True)
        self.after_mlp = LayerNorm(size, config.eps, build, bias=True)
        self._activation = ACTIVATIONS[config.activation]
        self._size = size

    def targets(self) -> Targets:
        names = [f"attention.self.{name}" for name in ("query", "key", "value")]
        yield from self.qkv.targets(names, [self._size] * 3)
        yield from self.output.targets(["attention.output.dense"])
        yield from self.after_attention.targets("attention.output.LayerNorm")
        yield from self.up.targets(["intermediate.dense"])
        yield from self.down.targets(["output.dense"])
        yield from self.after_mlp.targets("output.LayerNorm")

    def parts(self) -> tuple[Part, ...]:
        return self.qkv, self.output, self.up, self.down, self.after_attention, self.after_mlp

    def __call__(self, x: Tensor, offsets: Sequence[int]) -> Tensor:
        x = self.after_attention(self.output(self._attend(self.qkv(x), offsets)).add_(x))
        return self.after_mlp(self.down(self._activation(self.up(x))).add_(x))

    def _attend(self, qkv: Tensor, offsets: Sequence[int]) -> Tensor:
        """qkv [T, 3 * hidden] -> [T, hidden]: every row attends to all rows of its own text. Neighbours of one length
        are computed together."""
        out = qkv.new_empty(len(qkv), self._size)
        for first, last, length in _runs(offsets):
            rows = qkv[first:last].view(-1, length, 3, self.num_heads, self._size // self.num_heads)
            q, k, v = rows.permute(2, 0, 3, 1, 4)  # [texts, heads, length, head_dim]
            attended = F.scaled_dot_product_attention(q, k, v)
            out[first:last].view(-1, length, self.num_heads, q.shape[-1]).copy_(attended.transpose(1, 2))
        return out


def _runs(offsets: Sequence[int]) -> list[tuple[int, int, int]]:
    """The first row, the row behind the last, and the length of texts, for each run of neighbours of one length."""
    runs: list[tuple[int, int, int]] = []
    for first, last in pairwise(offsets):
        if runs and runs[-1][2] == last - first:
            runs[-1] = (runs[-1][0], last, last - first)
        else:
            runs.append((first, last, last - first))
    return runs


class ClassifierHead(Part):
    """A layer with tanh, then one number for each label, of the first token of a text."""

    def __init__(self, config: EncoderConfig, build: Build) -> None:
        assert config.num_labels is not None
        self.inner = build.plain.linear(config.hidden_size, config.hidden_size, bias=True)
        self.outer = build.plain.linear(config.hidden_size, config.num_labels, bias=True)
        own = config.family in ROBERTA  # others use the layer that they were trained with for pairs of sentences
        self._names = ("classifier.dense", "classifier.out_proj") if own else ("pooler.dense", "classifier")

    def targets(self) -> Targets:
        yield from self.inner.targets([self._names[0]])
        yield from self.outer.targets([self._names[1]])

    def parts(self) -> tuple[Part, ...]:
        return self.inner, self.outer

    def __call__(self, rows: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(rows)))


class Encoder(Part):
    """Embeddings of tokens, positions and token types, and layers."""

    reads_whole_prompts = True
    kv_dtype: torch.dtype
    has_own_threads = False

    def __init__(self, config: EncoderConfig, build: Build) -> None:
        self.config, self.dtype, self.device = config, build.dtype, build.device
        self.kv_dtype, self._format = build.dtype, build.format
        size = config.hidden_size
        self.words, self.positions, self.types = (
            build.empty(rows, size) for rows in (config.vocab_size, config.positions, config.token_types)
        )
        self.norm = LayerNorm(size, config.eps, build, bias=True)
        self.layers = [EncoderLayer(config, build) for _ in range(config.num_layers)]
        self.head = None if config.num_labels is None else ClassifierHead(config, build)
        self.vocab_size, self.hidden_size, self.max_len = config.vocab_size, size, config.max_len
        self.attention_layers: tuple[AttentionLayer, ...] = ()
        self.recurrent_layers: tuple[RecurrentLayer, ...] = ()

    def targets(self) -> Targets:
        yield "embeddings.word_embeddings.weight", self.words
        yield "embeddings.position_embeddings.weight", self.positions
        yield "embeddings.token_type_embeddings.weight", self.types
        yield from self.norm.targets("embeddings.LayerNorm")
        for index, layer in enumerate(self.layers):
            yield from add_prefix(f"encoder.layer.{index}", layer.targets())
        if self.head is not None:
            yield from self.head.targets()

    def parts(self) -> tuple[Part, ...]:
        return (self.norm, *self.layers, *present(self.head))

    def finalize(self) -> None:
        for linear in self.linears():
            linear.finalize()
        super().finalize()

    def hidden_states(self, batch: StepBatch, attention: StepAttention, rows: Tensor | None = None) -> HiddenStates:
        layout, config = batch.layout, self.config
        assert not any(layout.starts), "an encoder reads whole texts"
        x = F.embedding(batch.tokens, self.words) + F.embedding(batch.positions + config.first_position, self.positions)
        x = self.norm(x.add_(F.embedding(self._types(batch.tokens, layout.offsets), self.types)))
        for layer in self.layers:
            x = layer(x, layout.offsets)
        return HiddenStates(x if rows is None else x[rows])

    def _types(self, tokens: Tensor, offsets: Sequence[int]) -> Tensor:
        """The type of each token [T]: 1 behind the first separator of its text, which ends the first of a pair."""
        if self.config.separator is None or self.config.token_types < 2:
            return torch.zeros_like(tokens)
        ends = (tokens == self.config.separator).long()
        before = ends.cumsum(0) - ends  # separators in front of each token
        starts = torch.tensor(offsets[:-1], device=tokens.device)
        lengths = torch.tensor(offsets, device=tokens.device).diff()
        return (before - before[starts].repeat_interleave(lengths)).clamp(max=1)

    def classify(self, rows: Tensor) -> Tensor:
        """The numbers of the labels [n, labels], from the rows of first tokens [n, hidden]."""
        assert self.head is not None, "it has no classifier's head"
        return self.head(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("an encoder has no language-model head")

    def num_weight_bytes(self) -> int:
        tables = sum(table.nbytes for table in (self.words, self.positions, self.types))
        return tables + self.num_bytes

    def num_mapped_bytes(self) -> int:
        return 0

    @property
    def quantization(self) -> str:
        return self._format.name

    @property
    def used_formats(self) -> str:
        return count_formats([linear.weight for linear in self.linears()])


def load_encoder(
    config: Mapping[str, Any],
    tensors: NamedWeights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    format: type[WeightFormat],
    max_len: int | None = None,
) -> Encoder:
    """Build an encoder with the weights of a checkpoint; heads for other tasks are left out."""
    from chairlift.models.loader import fill

    encoder = Encoder(encoder_config(config, max_len), Build(dtype, device, format))
    unused = ["cls.", "lm_head.", "embeddings.position_ids"]
    if encoder.head is None:
        unused += ["pooler.", "classifier."]
    fill(dict(encoder.targets()), _renamed(tensors), text_part_only=False, tied=False, left_out=unused)
    encoder.finalize()
    return encoder


def _renamed(tensors: NamedWeights) -> NamedWeights:
    """The stream under the names that the encoder alone has."""
    for full_name, tensor in tensors:
        name = _PREFIX.sub("", full_name, count=1) if _PREFIX.match(full_name) else full_name
        for old, new in _OLD_NAMES.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        yield name, tensor
