"""The decoder: one implementation, shaped by a DecoderConfig, for all families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy

import torch
from torch import Tensor

from chairlift.attention.interface import StepAttention
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.embedding import Embedding, StoredEmbedding
from chairlift.layers.formats.base import WeightFormat, WeightRows, count_formats
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Linear
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.parts import Part, Targets, prefixed
from chairlift.layers.per_layer_input import PerLayerEmbedding
from chairlift.layers.recurrent.interface import RecurrentStep
from chairlift.layers.rope import RotaryEmbedding
from chairlift.layers.rows import one_by_one
from chairlift.loading.weight_cache.store import WeightStore
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig
from chairlift.models.decoder_layer import DecoderLayer
from chairlift.models.self_attention import make_norm
from chairlift.models.stacks.base import StackParts
from chairlift.models.stacks.choose import choose_stack
from chairlift.models.weights import EMBEDDING
from chairlift.models.wrappers import HEAD


class Decoder:
    """Embedding, layers, final norm, head.

    Built with empty weights: fill `targets`, call `filled` after each, and `finalize` at the end.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat] = PlainWeight,
        quantize_head: bool = False,
        batch_invariant: bool = False,
        weight_store: WeightStore | None = None,
    ) -> None:
        """`quantize_head`: store the head in `format`, too, also where the format leaves it plain by default.

        `batch_invariant`: make a token's numbers the same, bit for bit, whatever else is in the same step.

        `weight_store`: has packed weights, or is given them.
        """
        self._store = weight_store or WeightStore()
        self.config = config
        self.format = format
        self._quantize_head = quantize_head
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_len = config.max_len
        self.attention_layers = config.attention_layers
        self.recurrent_layers = config.recurrent_layers
        self.dtype = dtype
        self.device = device
        self.batch_invariant = batch_invariant
        scale = config.embedding_scale / config.residual_multiplier
        self.embedding: Embedding
        if format.becomes_blocks(dtype, device):
            weight = format.empty(config.vocab_size, config.hidden_size, dtype, device)
            self.embedding = StoredEmbedding(weight, scale, dtype)
        else:
            table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
            self.embedding = Embedding(table, scale, dtype)
        self.layers = [DecoderLayer(config, layer, dtype, device, format) for layer in config.layers]
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self.rotary = {rope: RotaryEmbedding(rope, dtype=dtype, device=device) for rope in ropes}
        self.per_layer: PerLayerEmbedding | None = None
        if config.per_layer_input_size:
            self.per_layer = PerLayerEmbedding(
                config.vocab_size,
                len(config.layers),
                config.per_layer_input_size,
                config.hidden_size,
                config.norm_eps,
                dtype=dtype,
                device=device,
                format=format,
            )
        self.norm = make_norm(config, config.hidden_size, config.stream_eps, dtype, device)
        if config.tied_head and isinstance(self.embedding, StoredEmbedding):
            self.head = Linear(self.embedding.weight)
        elif config.tied_head:
            self.head = Linear(self.embedding.table, shared=True, format=self.head_format)
        else:
            sizes = config.hidden_size, config.vocab_size
            self.head = Linear.empty(*sizes, bias=config.head_bias, dtype=dtype, device=device, format=self.head_format)
        if batch_invariant:
            for part in self._parts():
                part.make_batch_invariant()
            for rotary in self.rotary.values():
                rotary.make_batch_invariant()
        self.taps: tuple[int, ...] = ()  # layers whose input `hidden_states` returns as well
        self.stack = choose_stack(
            StackParts(config, self.embedding, self.layers, self.rotary, self.norm, self.per_layer),
            format,
            dtype=dtype,
            device=device,
            batch_invariant=batch_invariant,
        )
        self._restore()
        self._num_missing = [sum(1 for _ in layer.targets()) for layer in self.layers]  # targets still to be filled

    @property
    def quantization(self) -> str:
        """The name of the weights' format."""
        return self.format.name

    @property
    def used_formats(self) -> str:
        """How many linear maps have which format, in words."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        counts = count_formats([linear.weight for linear in (*linears, self.head)])
        mixtures = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)]
        forms = {each.form for mixture in mixtures for each in (mixture.gate_up, mixture.down)} - {"plain"}
        return f"{counts}; experts: {', '.join(sorted(forms))}" if forms else counts

    @property
    def head_format(self) -> type[WeightFormat]:
        """The format of the language-model head, and of draft heads."""
        return self.format.for_head(self.dtype, self.device, quantize=self._quantize_head)

    @property
    def kv_dtype(self) -> torch.dtype:
        linears = (linear for layer in self.layers for linear in layer.linears())
        return next((found for linear in linears if (found := linear.weight.kv_dtype)), self.dtype)

    @property
    def has_own_threads(self) -> bool:
        return self.stack.has_own_threads

    def targets(self) -> Targets:
        """Every tensor a checkpoint must hold, and the part of the model that it fills."""
        if isinstance(self.embedding, StoredEmbedding):
            yield EMBEDDING, WeightRows(self.embedding.weight, 0, self.vocab_size)
        else:
            yield EMBEDDING, self.embedding.table
        for index, layer in enumerate(self.layers):
            yield from prefixed(f"layers.{index}", layer.targets())
        yield from self.norm.targets(self.config.names.final_norm)
        if not self.config.tied_head:
            yield from self.head.targets([HEAD.removesuffix(".weight")])
        if self.per_layer is not None:
            yield from self.per_layer.targets()

    def filled(self, name: str) -> None:
        """Called after each target is filled: packs a layer when it is complete.

        So memory never holds all weights in full precision if the format is smaller.
        """
        if not name.startswith("layers."):
            return
        index = int(name.split(".")[1])
        self._num_missing[index] -= 1
        if self._num_missing[index] == 0:
            self.stack.before_packing(self.layers[index])
            for number, linear in enumerate(self.layers[index].linears()):
                linear.finalize()
                self._keep(f"layers.{index}.{number}", linear.weight)

    def finalize(self) -> None:
        """Called once every target is filled. One part after the other, so that memory never holds two models."""
        if isinstance(self.embedding, StoredEmbedding):
            self.embedding.finalize()
            self._keep(EMBEDDING, self.embedding.weight)
            if self.config.tied_head:
                self.head = Linear(self.embedding.weight)
        for part in self._parts():
            part.finalize()
        if not self._shares_table:
            self._keep(HEAD, self.head.weight)
        if not isinstance(self.embedding, StoredEmbedding):
            self.embedding.table = self.format.embedding(self.embedding.table)
        if self.per_layer is not None:
            self.per_layer.table = self.format.embedding(self.per_layer.table)
        self.stack.keep(self._store)
        self.stack.finalize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # leave the memory of replaced weights to the KV cache

    @property
    def _shares_table(self) -> bool:
        """Whether the head multiplies with the embedding table itself."""
        return self.config.tied_head and isinstance(self.embedding, StoredEmbedding)

    def _restore(self) -> None:
        """Use the packed weights that the store has; what a checkpoint holds for them is then ignored."""
        for index, layer in enumerate(self.layers):
            for number, linear in enumerate(layer.linears()):
                linear.weight = self._found(f"layers.{index}.{number}", linear.weight)
        if isinstance(self.embedding, StoredEmbedding):
            self.embedding.weight = self._found(EMBEDDING, self.embedding.weight)
            if self.config.tied_head:
                self.head = Linear(self.embedding.weight)
        if not self._shares_table:
            self.head.weight = self._found(HEAD, self.head.weight)
        self.stack.restore(self._store)

    def _found(self, name: str, weight: WeightFormat) -> WeightFormat:
        found = self._store.find(name)
        return weight if found is None else weight.restored_from(found)

    def _keep(self, name: str, weight: WeightFormat) -> None:
        arrays = weight.packed_arrays()
        if arrays and not weight.restored:
            weight.use_arrays(self._store.keep(name, weight.name, arrays))

    def tap(self, layers: Iterable[int]) -> None:
        """Return the inputs of these layers as well, in addition to those tapped before."""
        self.taps = tuple(sorted({*self.taps, *layers}))

    def first_layers(self, count: int) -> Decoder:
        """A model of the first `count` layers, which shares all weights with this one."""
        model = copy(self)
        model.layers, model.taps, model.stack = self.layers[:count], (), self.stack.first(count)
        return model

    def _parts(self) -> Iterator[Part]:
        for layer in self.layers:
            yield from layer.parts()
        yield self.norm
        yield self.head
        if self.per_layer is not None:
            yield self.per_layer

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden], the input of the first layer."""
        return self.embedding(tokens)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        rows: Tensor | None = None,
        recurrent: RecurrentStep | None = None,
    ) -> HiddenStates:
        return self.stack(tokens, positions, attention, self.taps, rows, recurrent)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        cap = self.config.logit_softcap
        if cap is None:
            return logits
        if on_gpu(logits.device):
            from chairlift.kernels.triton.products.activation import softcap

            return softcap(logits, cap)
        shares = logits.float().div_(cap)  # in place: the logits of a large vocabulary are megabytes per row
        return (one_by_one(torch.tanh, shares) if self.batch_invariant else shares.tanh_()) * cap

    def num_weight_bytes(self) -> int:
        parts = sum(part.num_bytes for part in self._parts() if not (self._shares_table and part is self.head))
        return self.embedding.num_bytes + parts

    def num_mapped_bytes(self) -> int:
        return self._store.mapped_bytes
