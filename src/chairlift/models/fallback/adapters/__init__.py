"""Adapters for model classes of transformers with attention code of their own: one module each, by model type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.registry import Registry

if TYPE_CHECKING:
    from chairlift.models.fallback.adapters.base import AttentionAdapter

ADAPTERS: Registry[type[AttentionAdapter]] = Registry("adapter", "chairlift.models.fallback.adapters", separator="_")


def find_adapter(model_type: str) -> AttentionAdapter | None:
    """A new adapter for a model type, if there is one."""
    name = model_type.replace("-", "_")
    return ADAPTERS.get(name)() if name in ADAPTERS.names() else None
