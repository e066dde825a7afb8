"""Checkpoints whose weights are quantized: one reader per `quant_method`, found by its name."""

from __future__ import annotations

from chairlift.loading.quantized.base import QuantizedReader
from chairlift.registry import Registry

READERS: Registry[type[QuantizedReader]] = Registry("quant_method", "chairlift.loading.quantized")
