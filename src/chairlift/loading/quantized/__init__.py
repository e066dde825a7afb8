"""Checkpoints whose weights are quantized: readers by `quant_method`, in modules of the kinds of numbers."""

from __future__ import annotations

from chairlift.loading.quantized.base import QuantizedReader
from chairlift.registry import Registry

READERS: Registry[type[QuantizedReader]] = Registry("quant_method", "chairlift.loading.quantized", grouped=True)
