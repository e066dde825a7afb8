"""Typed access to GGUF metadata: a value of the wrong type or range is a damaged file, not a TypeError later."""

from __future__ import annotations

import math
from typing import Any, Never

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.file import GGUFFile, corrupt


class Metadata:
    """The metadata of a file with keys below `prefix` (such as "llama.")."""

    def __init__(self, file: GGUFFile, prefix: str = "") -> None:
        self.file = file
        self.prefix = prefix

    def below(self, prefix: str) -> Metadata:
        return Metadata(self.file, prefix)

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def string(self, key: str) -> str | None:
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            self._refuse(key, value, "a text")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Read an integer, or a list with the same integer for every layer."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if (value != value[0]).any():
                problem = f"{self.prefix}{key} differs between layers, which is not supported"
                raise UnsupportedModel(f"{self.file.path}: {problem}")
            value = int(value[0])
        if type(value) is not int or not least <= value < 2**31:
            self._refuse(key, value, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self._refuse(key, value, "a positive number")
        return float(value)

    def numbers(self, key: str) -> NDArray[Any] | None:
        value = self.value(key)
        if value is not None and not isinstance(value, np.ndarray):
            self._refuse(key, value, "a list of numbers")
        return value

    def strings(self, key: str) -> list[str] | None:
        value = self.value(key)
        if value is not None and not (isinstance(value, list) and set(map(type, value)) <= {str}):
            self._refuse(key, value, "a list of texts")
        return value

    def value(self, key: str) -> Any:
        """Read a value of any type, to be checked by the caller; None if it is absent."""
        return self.file.metadata.get(self.prefix + key)

    def _refuse(self, key: str, value: Any, expected: str) -> Never:
        shown = "missing" if value is None else f"{value!r:.60}"
        corrupt(self.file.path, f"{self.prefix}{key} is {shown}, not {expected}")


def token_id(metadata: Metadata, kind: str) -> int | None:
    """The id of a special token ("bos", "eos", "padding", ...), checked against the vocabulary."""
    tokenizer = metadata.below("tokenizer.ggml.")
    if not tokenizer.has(f"{kind}_token_id"):
        return None
    index = tokenizer.integer(f"{kind}_token_id", least=0)
    size = len(tokenizer.strings("tokens") or ())
    if index >= size:
        corrupt(metadata.file.path, f"tokenizer.ggml.{kind}_token_id is {index}, beyond the {size} tokens")
    return index
