"""Random ragged batches with state slots, and recurrent layers computed on them token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.attention.recurrent import NO_SLOT, RecurrentBatch
from chairlift.layers.linear import Build
from chairlift.layers.recurrent.base import GateOrder, RecurrenceRule, RecurrentMixer, RecurrentShape
from chairlift.layers.recurrent.gated_delta import GatedDeltaShape, KimiDeltaShape
from chairlift.layers.recurrent.mamba2 import Mamba2Shape
from chairlift.layers.recurrent.short_convolution import ShortConvolutionShape

SLOTS = 9
CPU = torch.device("cpu")
HIDDEN = 20
SHAPES: dict[str, RecurrentShape] = {
    "gated delta": GatedDeltaShape(key_heads=1, heads=2, key_dim=10, value_dim=12, width=4, by_key_head=True),
    "mamba 2": Mamba2Shape(
        groups=2,
        heads=2,
        state_size=10,
        head_dim=12,
        width=3,
        convolution_bias=True,
        input_bias=False,
        output_bias=False,
        step_limits=(0.0, 2.0),
        order=GateOrder(first=True),
    ),
    "kimi delta": KimiDeltaShape(heads=2, head_dim=10, width=4),
    "short convolution": ShortConvolutionShape(channels=20, width=3, bias=True),
}


def make_batch(device: torch.device = CPU, padding: int = 2) -> RecurrentBatch:
    """Sequences of every kind, and padding rows behind them."""
    counts = [1, 70, 0, 3, 17]
    read = [4, 2, NO_SLOT, NO_SLOT, 7]  # a decode, a continued prompt, nothing, a new prompt, copy-on-write
    write = torch.full((sum(counts) + padding,), NO_SLOT)
    write[0] = 4  # the slot that it reads
    write[[1, 31, 70]] = torch.tensor([1, 5, 2])  # a snapshot after the first row, one in the middle, the final state
    write[71:74] = torch.tensor([0, 3, 6])  # a state for each draft
    write[90] = 8
    starts = torch.tensor([0, *counts]).cumsum(0)
    tensors = (tensor.to(torch.int32).to(device) for tensor in (starts, torch.tensor(read), write))
    return RecurrentBatch(*tensors, longest=max(counts))


@dataclass
class Recurrence:
    """The inputs of a linear recurrence, in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    rate: Tensor
    state: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        return self.q, self.k, self.v, (self.decay, self.rate)


def make_recurrence(
    batch: RecurrentBatch, *, key_heads: int, heads: int, key_dim: int, value_dim: int, wide_decay: bool
) -> Recurrence:
    generator = torch.Generator().manual_seed(key_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(batch.write.device)

    rows = len(batch.write)
    return Recurrence(
        q=normal(rows, key_heads, key_dim),
        k=normal(rows, key_heads, key_dim),
        v=normal(rows, heads, value_dim),
        decay=-normal(rows, heads, key_dim if wide_decay else 1).abs() * 0.3,
        rate=normal(rows, heads).sigmoid(),
        state=normal(SLOTS, heads, key_dim, value_dim),
    )


def exact_recurrence(case: Recurrence, rule: RecurrenceRule, batch: RecurrentBatch) -> tuple[Tensor, Tensor]:
    """The outputs and the states after the batch, in float64."""
    q, k, v, decay, rate = (tensor.double() for tensor in (case.q, case.k, case.v, case.decay, case.rate))
    groups = v.shape[1] // q.shape[1]
    q, k = (tensor.repeat_interleave(groups, dim=1) for tensor in (q, k))
    if rule.normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + rule.eps).rsqrt() for x in (q, k))
    out, state = torch.zeros_like(v), case.state.double()
    starts, read, write = (tensor.tolist() for tensor in (batch.starts, batch.read, batch.write))
    begun = [torch.zeros_like(state[0]) if slot < 0 else state[slot].clone() for slot in read]
    for sequence, s in enumerate(begun):
        for row in range(starts[sequence], starts[sequence + 1]):
            s = s * decay[row].exp()[:, :, None]
            error = v[row] - torch.einsum("hk,hkv->hv", k[row], s) if rule.delta else v[row]
            s = s + torch.einsum("hk,hv->hkv", k[row], rate[row][:, None] * error)
            out[row] = rule.scale * torch.einsum("hk,hkv->hv", q[row], s)
            if write[row] >= 0:
                state[write[row]] = s
    return out, state


def exact_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: RecurrentBatch, *, silu: bool
) -> tuple[Tensor, Tensor]:
    """x [T, channels], weight [width, channels], state [slots, width - 1, channels]: the outputs and the states."""
    x, weight, state = x.double(), weight.double(), state.double()
    starts, read, write = (tensor.tolist() for tensor in (batch.starts, batch.read, batch.write))
    begun = [torch.zeros_like(state[0]) if slot < 0 else state[slot].clone() for slot in read]
    out = torch.zeros_like(x)
    for sequence, recent in enumerate(begun):
        for row in range(starts[sequence], starts[sequence + 1]):
            window = torch.cat((recent, x[row : row + 1]))
            out[row] = (window * weight).sum(0) + (0.0 if bias is None else bias.double())
            recent = window[1:]
            if write[row] >= 0:
                state[write[row]] = recent
    return (out * out.sigmoid() if silu else out), state


def make_layer(shape: RecurrentShape, device: torch.device = CPU) -> RecurrentMixer:
    """A layer with seeded weights, the same on every device."""
    torch.manual_seed(0)
    layer = shape.make(HIDDEN, 1e-5, Build(torch.float32, device))
    for _, target in layer.targets():
        target.copy_(torch.randn(target.shape) * 0.5)
    for part in layer.parts():
        part.finalize()
    return layer
