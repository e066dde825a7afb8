"""All layers of a decoder with quantized weights in one call of a CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import HostWork, StepAttention
from chairlift.attention.paged.cpu import as_array
from chairlift.attention.storage import KVStorage
from chairlift.kernels.cpu.adapters import NO_TERMS, Terms
from chairlift.kernels.cpu.blocks.product import PanelWeight
from chairlift.kernels.cpu.decoder import Buffers, Network, Step, decode_step
from chairlift.kernels.cpu.layer_math import GELU_TANH, RELU, RELU_SQUARED, SILU, XIELU, Norms
from chairlift.kernels.cpu.threads import the_team
from chairlift.kernels.cpu.weights import ROW_TYPES
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.mlp import DenseMLP
from chairlift.layers.norm import Norm
from chairlift.layers.rope import HostRotary
from chairlift.loading.weight_cache.cache_file import UnusableCache
from chairlift.loading.weight_cache.store import WeightCache
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig
from chairlift.models.decoder_layer import DecoderLayer
from chairlift.models.programs.base import LayerProgram, ModelParts, PlainProgram

ACTIVATIONS = {
    "silu": SILU,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_new": GELU_TANH,
    "relu": RELU,
    "relu2": RELU_SQUARED,
    "xielu": XIELU,
}


def fuse(parts: ModelParts, format: type[WeightFormat]) -> FusedCPUProgram:
    packs_tiles = format.traits.tile_type is not None
    return FusedCPUProgram(parts, LayerTiles(parts.layers, format) if packs_tiles else None)


def can_fuse(config: DecoderConfig) -> bool:
    """Whether all layers have one shape, and the kernel has all their operations."""
    if config.recurrent_layers:
        return False
    first = config.layers[0]
    alike = all(
        layer.experts is None
        and layer.intermediate_size == first.intermediate_size
        and layer.only_attention.num_heads == first.only_attention.num_heads
        and layer.only_attention.num_kv_heads == first.only_attention.num_kv_heads
        and layer.only_attention.head_dim == first.only_attention.head_dim
        and layer.latent is None
        for layer in config.layers
    )
    pairs = {len(layer.rope.inv_freq) for layer in config.layers if layer.rope is not None}
    qk_norms = config.qk_norm is None or (config.qk_norm in ("head", "full") and config.norm_kind == "rms")
    return bool(
        alike
        and qk_norms
        and len(pairs) <= 1
        and config.qkv_clip is None
        and not config.scales_queries
        and config.has_usual_layers
        and not config.gated_attention
        and config.activation in ACTIVATIONS
    )


class FusedCPUProgram(LayerProgram):
    """Runs a step in one call where its attention can be a part of it, else layer by layer."""

    has_own_threads = True
    is_one_kernel = True

    def __init__(self, parts: ModelParts, tiles: LayerTiles | None = None) -> None:
        """`tiles`: where the weights will be packed, or are already; None if the checkpoint may have blocks."""
        super().__init__(parts)
        self._plain = PlainProgram(parts)
        self._tiles = tiles
        self._fused: FusedCPULayers | None = None

    def restore(self, cache: WeightCache) -> None:
        if self._tiles is not None:
            self._tiles.restore(cache)

    def keep(self, cache: WeightCache) -> None:
        if self._tiles is not None:
            self._tiles.keep(cache)

    def finalize(self) -> None:
        layers = self.parts.layers
        tiles = self._tiles or LayerPanels.of(layers)
        if tiles is None:  # some weight is not in blocks
            self.has_own_threads = self.is_one_kernel = False
        else:
            self._fused = FusedCPULayers(self.parts.config, layers, self.parts.norm, tiles)

    def first(self, count: int) -> FusedCPUProgram:
        program = FusedCPUProgram(self.parts.first(count), self._tiles)
        program.finalize()
        return program

    def __call__(
        self, batch: StepBatch, attention: StepAttention, taps: Sequence[int], rows: Tensor | None
    ) -> HiddenStates:
        assert batch.recurrent is None, "layers with states are not fused"
        work = None if self._fused is None else attention.work(self._fused.layer)
        deep = batch.embeddings is not None and batch.embeddings.deep
        if self._fused is None or work is None or deep:
            return self._plain(batch, attention, taps, rows)
        x = self.parts.embedding(batch.tokens)
        if batch.embeddings is not None:
            x = batch.embeddings.put_into(x)
        positions = batch.positions if batch.rotary_positions is None else batch.rotary_positions
        self.parts.adapters.begin(batch.adapters)
        return HiddenStates(*self._fused(x, positions, work, taps, rows, self.parts.adapters.terms(rows)))


class LayerTiles:
    """The weights of all layers, one behind the other, as the kernel reads them."""

    NAMES = ("qkv", "output", "gate_up", "down")

    def __init__(self, layers: Sequence[DecoderLayer], format: type[WeightFormat]) -> None:
        """The layers, all of one shape, will be packed into these tiles."""
        self._layers, self._format = layers, format
        assert format.traits.tile_type is not None
        tile_type = format.traits.tile_type()
        self.qkv, self.output, self.gate_up, self.down = (
            tile_type.empty(len(layers), linear.out_features, linear.in_features) for linear in layers[0].linears()
        )
        self._assign()

    def _assign(self) -> None:
        for index, each in enumerate(self._layers):
            for linear, name in zip(each.linears(), self.NAMES, strict=True):
                linear.weight.tiles, linear.weight.owns_tiles = getattr(self, name).layer(index), False

    def restore(self, cache: WeightCache) -> None:
        """Use the tiles of the cache, if it has them; raises UnusableCache if they do not fit."""
        weights = {name: cache.find(f"layers.{name}") for name in self.NAMES}
        if None in weights.values():
            return
        try:
            for name, weight in weights.items():
                assert weight is not None
                setattr(self, name, getattr(self, name).replaced(weight.arrays))
        except ValueError as error:
            raise UnusableCache(str(error)) from None
        self._assign()
        for layer in self._layers:
            for linear in layer.linears():
                linear.weight.restored, linear.weight.plain = True, None

    def keep(self, cache: WeightCache) -> None:
        if any(linear.weight.restored for layer in self._layers for linear in layer.linears()):
            return
        for name in self.NAMES:
            tiles = getattr(self, name)
            setattr(self, name, tiles.replaced(cache.keep(f"layers.{name}", self._format.name, tiles.arrays())))
        self._assign()


@dataclass(frozen=True, slots=True)
class LayerPanels:
    """Where the blocks of all layers' weights are."""

    qkv: PanelWeight
    output: PanelWeight
    gate_up: PanelWeight
    down: PanelWeight

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer]) -> LayerPanels | None:
        """None if some weight is not in blocks."""
        tables: list[list[np.ndarray]] = [[], [], [], []]
        for layer in layers:
            for linear, table in zip(layer.linears(), tables, strict=True):
                if linear.weight.panels is None:
                    return None
                table.append(linear.weight.panels.panels)
        return cls(*(PanelWeight(np.stack(table)) for table in tables))


class FusedCPULayers:
    """Runs `layers`, whose weights are in `tiles` and whose keys and values are stored one behind the other, and then
    `norm`."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        tiles: LayerTiles | LayerPanels,
    ) -> None:
        ropes = list(dict.fromkeys(layer.rope for layer in layers if layer.rope is not None))
        self._rotary = HostRotary(ropes)
        mlps = [layer.dense for layer in layers if layer.dense is not None]
        attentions = [layer.attention for layer in layers]
        self.network = Network(
            before_attention=_norms([layer.before_attention for layer in layers]),
            qkv=tiles.qkv,
            qkv_bias=_stack_biases([attention.qkv.bias for attention in attentions]),
            q_norm=_stack([attention.q_norm for attention in attentions]),
            k_norm=_stack([attention.k_norm for attention in attentions]),
            output=tiles.output,
            output_bias=_stack_biases([attention.output.bias for attention in attentions]),
            after_attention=_norms([layer.after_attention for layer in layers]),
            before_mlp=_norms([layer.before_mlp for layer in layers]),
            gate_up=tiles.gate_up,
            gate_up_bias=_stack_biases([mlp.first.bias for mlp in mlps]),
            down=tiles.down,
            down_bias=_stack_biases([mlp.down.bias for mlp in mlps]),
            after_mlp=_norms([layer.after_mlp for layer in layers]),
            final_norm=norm.weight.float().numpy(),
            final_bias=_norms([norm]).bias[0],
            centers=config.norm_kind == "layer",
            norms_all_heads=config.qk_norm == "full",
            norms_after_rope=config.qk_norm_after_rope,
            parallel=config.parallel_block,
            gated=config.gated_mlp,
            eps=np.float32(config.stream_eps),
            qk_eps=np.float32(config.norm_eps),
            activation=ACTIVATIONS[config.activation],
            factors=np.stack([_factors(mlp) for mlp in mlps]),
            ropes=np.array([-1 if layer.rope is None else ropes.index(layer.rope) for layer in layers]),
            scales=np.array([attention.layer.scale for attention in attentions], dtype=np.float32),
            windows=np.array([attention.layer.window or 0 for attention in attentions]),
            softcaps=np.array([attention.layer.softcap or 0.0 for attention in attentions], dtype=np.float32),
            chunks=np.array([attention.layer.chunk or 0 for attention in attentions]),
            sinks=_stack_biases([attention.sinks for attention in attentions]),
            taps=np.full(len(layers), -1),
        )
        self.layer = attentions[0].layer
        self._taps: Sequence[int] = ()  # those that `network.taps` has
        self._row_type = ROW_TYPES[type(tiles.qkv)]
        self._inner, self._gated = config.layers[0].intermediate_size, config.gated_mlp
        self._buffers: Buffers | None = None
        self._places: tuple[KVStorage, np.ndarray] | None = None  # those of the layers in the storage used last
        self._team = the_team()  # sized by torch's threads, which are reduced to one later

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        work: HostWork,
        taps: Sequence[int] = (),
        rows: Tensor | None = None,
        adapters: Terms = NO_TERMS,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run all layers on the embedded tokens x [T, hidden], which are overwritten.

        Returns [T, hidden] after the final norm, or only `rows` of it, and the inputs of the layers `taps`
        [T, hidden] each.
        """
        out = x if rows is None else x.new_empty(len(rows), x.shape[1])
        cos, sin = self._rotary(positions.numpy())
        keys, values, places = self.stored(work.storage)
        slots, tables = _described(work.layout)
        step = Step(
            x=x.numpy(),
            cos=cos,
            sin=sin,
            slots=slots,
            keys=keys,
            values=values,
            tables=tables,
            places=places,
            work=work.pieces,
            tapped=np.empty((len(taps), *x.shape), dtype=np.float32),
            rows=np.arange(len(x)) if rows is None else _check_rows(rows.long().numpy(), len(x)),
            out=out.numpy(),
            adapters=adapters,
        )
        if taps != self._taps:
            self._taps = taps
            self.network.taps[:] = -1
            self.network.taps[list(taps)] = range(len(taps))
        self._team.run(decode_step, self.network, step, self.room_for(len(x), x.shape[1]))
        return out, torch.from_numpy(step.tapped).unbind()

    def stored(self, storage: KVStorage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The keys and values of all planes, and the plane and the block table of each layer."""
        assert storage.stacked is not None, "layers of one shape are stored together"
        keys, values = storage.stacked
        first = self.layer.index
        if self._places is None or self._places[0] is not storage:
            indices = range(first, first + len(self.network.scales))
            self._places = storage, np.array([storage.place(layer) for layer in indices])
        return as_array(keys), as_array(values), self._places[1]

    def room_for(self, rows: int, hidden: int) -> Buffers:
        if self._buffers is None or len(self._buffers.qkv) < rows:
            layer = self.layer
            self._buffers = Buffers.empty(
                rows,
                hidden,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                self._inner,
                self._gated,
                self._row_type,
            )
        return self._buffers


def _described(layout: RaggedLayout) -> tuple[np.ndarray, np.ndarray]:
    """The slots [G, T] and the tables [G, S, longest] of all block tables."""
    slots, tables = layout.slot_mapping.numpy(), layout.tables.numpy()
    if not layout.beside:
        return slots[None], tables[None]
    others = [(each.slot_mapping.numpy(), each.tables.numpy()) for each in layout.beside]
    return np.stack([slots, *(own for own, _ in others)]), np.stack([tables, *(own for _, own in others)])


def _check_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """Check what the kernel does not: two threads would write the same row if it came twice."""
    if len(rows) and not (rows.min() >= 0 and rows.max() < count and len(np.unique(rows)) == len(rows)):
        raise IndexError(f"rows must be different ones of {count}, got {rows.tolist()}")
    return rows


def _stack(norms: list[Norm | None]) -> np.ndarray:
    rows = [np.empty(0, dtype=np.float32) if norm is None else norm.weight.float().numpy() for norm in norms]
    return np.stack(rows)


def _norms(norms: list[Norm | None]) -> Norms:
    biases = [None if norm is None else norm.bias for norm in norms]
    return Norms(_stack(norms), _stack_biases([None if bias is None else bias.float() for bias in biases]))


def _factors(mlp: DenseMLP) -> np.ndarray:
    """The numbers of the activation of a block, if it has any."""
    factors = [] if mlp.learned_activation is None else mlp.learned_activation.factors()
    return np.array(factors, dtype=np.float32)


def _stack_biases(biases: list[Tensor | None]) -> np.ndarray:
    return np.stack([np.empty(0, dtype=np.float32) if bias is None else bias.numpy() for bias in biases])
