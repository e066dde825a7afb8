"""The adapters that requests may name as their model, as the HTTP processes know them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.config import parse_adapters
from chairlift.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    name: str
    created: int = field(default_factory=lambda: int(time.time()))


class ServedAdapters:
    """Names in the order of their registration; llama.cpp's clients number them so."""

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self._by_name = {name: ServedAdapter(name) for name in names or {}}

    @classmethod
    def of(cls, engine: Mapping[str, Any]) -> ServedAdapters:
        """Those of an engine with these options."""
        return cls(parse_adapters(engine.get("lora") or {}))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def get(self, name: str | None) -> ServedAdapter | None:
        return None if name is None else self._by_name.get(name)

    def add(self, name: str) -> None:
        self._by_name[name] = ServedAdapter(name)

    def remove(self, name: str) -> None:
        self._by_name.pop(name, None)

    def chosen(self, model: str | None) -> dict[str, float] | None:
        """The adapter of a request that names this model, with its weight."""
        return None if self.get(model) is None else {str(model): 1.0}

    def scaled(self, scales: Mapping[int, float]) -> dict[str, float]:
        """The adapters with these numbers, and their weights; without weights the base model answers."""
        names = self.names
        for number in scales:
            if not 0 <= number < len(names):
                raise InvalidParameter("lora", f"there is no adapter {number}; there are {len(names)}, from 0 on")
        return {names[number]: scale for number, scale in scales.items() if scale}
