"""The formats in which weights are stored: one module each, found by the name that the option `quantization` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.registry import Registry

if TYPE_CHECKING:  # checking an option must not import torch
    from chairlift.layers.formats.base import WeightFormat

FORMATS: Registry[type[WeightFormat]] = Registry("quantization", "chairlift.layers.formats")
