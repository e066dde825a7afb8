"""A decoder with 8-bit weights on the CPU, all its layers one call of a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.base import HostAttend
from chairlift.attention.paged.cpu import as_array
from chairlift.attention.storage import KVStorage
from chairlift.kernels.cpu.decoder import GELU_TANH, SILU, Buffers, Network, Step, decode_step
from chairlift.kernels.cpu.int8 import PackedWeight
from chairlift.kernels.cpu.threads import the_team
from chairlift.layers.mlp import GatedMLP
from chairlift.layers.norm import RMSNorm
from chairlift.layers.rope import Rope, Rotation
from chairlift.models.config import DecoderConfig

if TYPE_CHECKING:
    from chairlift.models.decoder import DecoderLayer

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


def can_fuse(config: DecoderConfig) -> bool:
    """Whether all layers are alike and made of what the kernel knows."""
    norms, first = config.norms, config.layers[0]
    alike = all(
        layer.experts is None
        and layer.intermediate_size == first.intermediate_size
        and layer.attention.num_heads == first.attention.num_heads
        and layer.attention.num_kv_heads == first.attention.num_kv_heads
        and layer.attention.head_dim == first.attention.head_dim
        for layer in config.layers
    )
    pairs = {len(layer.rope.inv_freq) for layer in config.layers if layer.rope is not None}
    plain_norms = norms.before_attention and norms.before_mlp and not norms.after_attention and not norms.after_mlp
    return bool(
        alike and plain_norms and len(pairs) <= 1 and config.qk_norm != "full" and config.activation in ACTIVATIONS
    )


class LayerWeights:
    """The 8-bit weights of all layers, one behind the other, as the kernel wants them."""

    def __init__(self, config: DecoderConfig) -> None:
        layer = config.layers[0]
        queries = layer.attention.num_heads * layer.attention.head_dim
        both = 2 * layer.attention.num_kv_heads * layer.attention.head_dim
        count, hidden, inner = len(config.layers), config.hidden_size, layer.intermediate_size
        self.qkv = PackedWeight.empty(count, queries + both, hidden)
        self.output = PackedWeight.empty(count, hidden, queries)
        self.gate_up = PackedWeight.empty(count, 2 * inner, hidden)
        self.down = PackedWeight.empty(count, hidden, inner)

    def take(self, index: int, layer: DecoderLayer) -> None:
        """Round the weights of one layer, which are let go."""
        assert isinstance(layer.mlp, GatedMLP)
        layer.attention.qkv.round(self.qkv.layer(index))
        layer.attention.output.round(self.output.layer(index))
        layer.mlp.gate_up.round(self.gate_up.layer(index))
        layer.mlp.down.round(self.down.layer(index))


class FusedCPUDecoder:
    """Runs `layers`, whose weights are in `weights` and whose keys and values are stored one behind the other; then
    `norm`."""

    def __init__(
        self, config: DecoderConfig, layers: Sequence[DecoderLayer], norm: RMSNorm, weights: LayerWeights
    ) -> None:
        self._ropes = list(dict.fromkeys(layer.rope for layer in layers if layer.rope is not None))
        mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, GatedMLP)]
        attentions = [layer.attention for layer in layers]
        self.network = Network(
            before_attention=_stack([layer.before_attention for layer in layers]),
            qkv=weights.qkv,
            qkv_bias=_stack_biases([attention.qkv.bias for attention in attentions]),
            q_norm=_stack([attention.q_norm for attention in attentions]),
            k_norm=_stack([attention.k_norm for attention in attentions]),
            output=weights.output,
            output_bias=_stack_biases([attention.output.bias for attention in attentions]),
            before_mlp=_stack([layer.before_mlp for layer in layers]),
            gate_up=weights.gate_up,
            gate_up_bias=_stack_biases([mlp.gate_up.bias for mlp in mlps]),
            down=weights.down,
            down_bias=_stack_biases([mlp.down.bias for mlp in mlps]),
            final_norm=norm.weight.numpy(),
            eps=np.float32(config.norm_eps),
            activation=ACTIVATIONS[config.activation],
            ropes=np.array([-1 if layer.rope is None else self._ropes.index(layer.rope) for layer in layers]),
            scales=np.array([attention.layer.scale for attention in attentions], dtype=np.float32),
            windows=np.array([attention.layer.window or 0 for attention in attentions]),
            softcaps=np.array([attention.layer.softcap or 0.0 for attention in attentions], dtype=np.float32),
            taps=np.full(len(layers), -1),
        )
        self._layer = attentions[0].layer
        self._inner = config.layers[0].intermediate_size
        self._buffers: Buffers | None = None
        self._team = the_team()  # sized by torch's threads, of which few will be left

    def __call__(
        self,
        x: Tensor,
        rotations: Mapping[Rope, Rotation],
        attend: HostAttend,
        taps: Sequence[int] = (),
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden], the embedded tokens, which are used up -> [T, hidden] after the final norm, or those of `rows`
        alone; and what the layers `taps` read [taps, T, hidden]."""
        out = x if rows is None else x.new_empty(len(rows), x.shape[1])
        angles = [rotations[rope] for rope in self._ropes]
        cos, sin = (_stack_angles([getattr(rotation, side) for rotation in angles], len(x)) for side in ("cos", "sin"))
        keys, values = self.stored(attend.storage)
        step = Step(
            x=x.numpy(),
            cos=cos,
            sin=sin,
            slots=attend.layout.slots.numpy(),
            keys=keys,
            values=values,
            tables=attend.layout.tables.numpy(),
            work=attend.work(self._layer),
            tapped=np.empty((len(taps), *x.shape), dtype=np.float32),
            rows=np.arange(len(x)) if rows is None else _checked(rows.long().numpy(), len(x)),
            out=out.numpy(),
        )
        self.network.taps[:] = -1
        self.network.taps[list(taps)] = range(len(taps))
        self._team.run(decode_step, self.network, step, self.room_for(len(x), x.shape[1]))
        return out, torch.from_numpy(step.tapped) if taps else None

    def stored(self, storage: KVStorage) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values of its first layer and those behind it."""
        assert storage.stacked is not None, "layers that are alike are stored together"
        keys, values = (as_array(side)[self._layer.index :] for side in storage.stacked)
        return keys, values

    def room_for(self, rows: int, hidden: int) -> Buffers:
        if self._buffers is None or len(self._buffers.qkv) < rows:
            layer = self._layer
            self._buffers = Buffers.empty(
                rows, hidden, layer.num_heads, layer.num_kv_heads, layer.head_dim, self._inner
            )
        return self._buffers


def _checked(rows: np.ndarray, count: int) -> np.ndarray:
    """The kernel does not ask, and its threads would be in each other's way where a row came twice."""
    if len(rows) and not (rows.min() >= 0 and rows.max() < count and len(np.unique(rows)) == len(rows)):
        raise IndexError(f"rows must be different ones of {count}, got {rows.tolist()}")
    return rows


def _stack(norms: list[RMSNorm | None]) -> np.ndarray:
    rows = [np.empty(0, dtype=np.float32) if norm is None else norm.weight.float().numpy() for norm in norms]
    return np.stack(rows)


def _stack_biases(biases: list[Tensor | None]) -> np.ndarray:
    return np.stack([np.empty(0, dtype=np.float32) if bias is None else bias.numpy() for bias in biases])


def _stack_angles(angles: list[Tensor], rows: int) -> np.ndarray:
    """[T, 1, pairs] each -> [ropes, T, pairs]."""
    if not angles:
        return np.empty((0, rows, 0), dtype=np.float32)
    return torch.stack([angle[:, 0] for angle in angles]).numpy()
