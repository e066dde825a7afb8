"""The attention backends: one module each, found by the name that the option `attention` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.registry import Registry

if TYPE_CHECKING:  # checking an option must not import torch
    from chairlift.attention.backends.base import AttentionBackend

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention", "chairlift.attention.backends")
