"""Ragged attention: straight from the blocks of the cache, without padding, by a compiled kernel of the device."""

from __future__ import annotations

import torch

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import AttentionBackend
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
        from chairlift.attention.paged.cpu import PagedCPUAttention

        return PagedCPUAttention
