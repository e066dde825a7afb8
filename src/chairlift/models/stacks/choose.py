"""Choosing the layer stack of a model."""

from __future__ import annotations

import torch

from chairlift.layers.formats.base import WeightFormat
from chairlift.models.stacks.base import LayerStack, StackParts
from chairlift.models.stacks.plain import PlainStack


def choose_stack(
    parts: StackParts,
    format: type[WeightFormat],
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> LayerStack:
    """The fastest stack for the model. Called before the weights are filled."""
    if format.packs_tiles:
        from chairlift.models.stacks import fused_cpu  # numba is slow to import

        if fused_cpu.can_fuse(parts.config):
            return fused_cpu.FusedCPUStack(parts, fused_cpu.LayerTiles(parts.config, parts.layers, format))
        return PlainStack(parts, has_own_threads=True)
    if format.becomes_blocks(dtype, device):
        from chairlift.models.stacks import fused_cpu

        if fused_cpu.can_fuse(parts.config):
            return fused_cpu.FusedCPUStack(parts)
    has_experts = any(layer.experts is not None for layer in parts.config.layers)
    if format.most_fused_rows and (not batch_invariant or (format.fuses_invariantly and not has_experts)):
        from chairlift.models.stacks import fused_gpu

        if fused_gpu.can_fuse(parts.config, dtype, device):
            return fused_gpu.FusedGPUStack(parts)
    return PlainStack(parts)
