"""Ragged attention: straight from the blocks of the cache, without padding, by a compiled kernel of the device."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.interface import AttentionLayer
from chairlift.kernels.gpu import on_gpu


@BACKENDS.register("ragged")
class RaggedAttention(AttentionBackend):
    name = "ragged"
    preference = 2

    @classmethod
    def implementation(cls, device: torch.device) -> type[AttentionBackend]:
        if on_gpu(device):
            from chairlift.attention.paged.gpu import PagedGPUAttention

            return PagedGPUAttention
        if find_spec("numba") is None:
            return cls
        from chairlift.attention.paged.cpu import PagedCPUAttention

        return PagedCPUAttention

    @classmethod
    def obstacles(cls, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype) -> list[str]:
        return ["numba is not installed"]
