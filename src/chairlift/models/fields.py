"""Reading values of a config.json, each checked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.errors import CorruptCheckpoint

MAX_LAYERS = 4096
MAX_SIZE = 2**31  # far above any dimension of a real model; a hostile config must not cause an allocation
SMALLEST, LARGEST = 1e-30, 1e30  # numbers beyond would overflow what is computed with them


class Fields:
    """A mapping from a config file, with the defaults of its model family."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._defaults = defaults
        self._where = where

    def updated(self, values: Mapping[str, Any]) -> Fields:
        """The same fields with these values in front."""
        return Fields({**self._values, **values}, self._defaults, self._where)

    def raw(self, name: str) -> Any:
        """The value as written; an explicit null is not the same as leaving the name out."""
        return self._values.get(name, self._defaults.get(name))

    def __contains__(self, name: str) -> bool:
        return self.raw(name) is not None

    def integer(self, name: str, *, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._require(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name, f"an integer between {low} and {high}")
        return value

    def optional_integer(self, name: str, *, low: int = 1) -> int | None:
        return self.integer(name, low=low) if name in self else None

    def number(self, name: str) -> float:
        """A finite number above zero, as everything must be that a model scales or divides by."""
        value = self._require(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not SMALLEST <= value <= LARGEST:
            raise self._bad(name, f"a finite number between {SMALLEST:g} and {LARGEST:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if value not in (None, False, True):
            raise self._bad(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        value = self._require(name)
        if not isinstance(value, str):
            raise self._bad(name, "a string")
        return value

    def items(self, name: str, kind: type | tuple[type, ...], *, length: int | None = None) -> list[Any]:
        """A list of values of one kind, by default empty."""
        value = self.raw(name)
        value = [] if value is None and length is None else value
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._bad(name, "a list of values of one kind")
        if length is not None and len(value) != length:
            raise CorruptCheckpoint(f"{self._where}: {name} must have {length} entries, has {len(value)}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """A nested object, by default empty."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._bad(name, "an object")
        return value

    def _require(self, name: str) -> Any:
        value = self.raw(name)
        if value is None:
            raise CorruptCheckpoint(f"{self._where}: {name} is missing")
        return value

    def _bad(self, name: str, expected: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self._where}: {name} must be {expected}, got {self.raw(name)!r:.100}")
