"""Counts what the rendering of one chat template computes, and raises once it is too much."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_TEXT = 8 * 2**20  # characters of one text
MAX_STEPS = 500_000  # items of loops, calls, operators and filters
MAX_VALUES = 400_000  # The limit of one list or mapping, with all that is nested in it.
MAX_BITS = 4096  # The limit of an integer.
_ALL_CHARACTERS = 2**29  # The limit of all results, most of which are short-lived.
_ALL_VALUES = 2**24  # The limit of all results, which lists keep alive.
_ATOMS = frozenset([int, float, bool, type(None)])


class Meter:
    """The limits of one rendering."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = _ALL_CHARACTERS
        self._values = _ALL_VALUES

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")

    def measured(self, value: Any) -> Any:
        """Return `value` if it and all results so far are small enough."""
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise SecurityError("a number is too large")
            return value
        if isinstance(value, (str, bytes)):
            self._characters -= len(value)
            too_much = len(value) > MAX_TEXT or self._characters < 0
        elif isinstance(value, (Sequence, Mapping, Set)) and not isinstance(value, range):
            num_values, num_characters = size_of(value)
            self._values -= num_values
            self._characters -= num_characters
            too_much = self._values < 0 or self._characters < 0
        else:
            return value
        if too_much:
            raise SecurityError("the template computes too much text or data")
        return value


def size_of(value: Any) -> tuple[int, int]:
    """Return how many values and characters the text of a value consists of; parts that occur twice count twice."""
    pending, num_values, num_characters = [value], 0, 0
    while pending:
        one = pending.pop()
        kind = type(one)
        num_values += 1
        if kind in _ATOMS:
            continue
        if kind is str or isinstance(one, (str, bytes)):
            num_characters += len(one)
        elif kind is list or kind is tuple:
            pending += one
        elif isinstance(one, Mapping):
            pending += one.keys()
            pending += one.values()
        elif isinstance(one, (Sequence, Set)) and not isinstance(one, range):
            pending += one
        elif isinstance(one, Namespace):
            raise SecurityError("a namespace cannot be part of a value")
        if num_values + len(pending) > MAX_VALUES or num_characters > MAX_TEXT:
            raise SecurityError("a value is too large")
    return num_values, num_characters


def text_of(value: Any) -> str:
    """Return `str(value)`, if it is short enough."""
    if not isinstance(value, str):
        size_of(value)
    text = str(value)
    check_product(1, len(text))
    return text


def check_product(first: Any, second: Any, more: int = 0) -> None:
    """Refuse a text or list of `first * second + more` items if that is too many; no numbers, no limit."""
    if isinstance(first, int) and isinstance(second, int) and first * second + more > MAX_TEXT:
        raise SecurityError("the result is too long")


def check_format(pattern: str, values: Sequence[Any]) -> None:
    """Refuse `pattern % values` if the result may be too long."""
    if re.search(r"%[^%a-zA-Z]*(\d{4}|\*)", pattern):
        raise SecurityError("the width of a format is too large")
    if values and isinstance(values[0], Mapping):
        values = list(values[0].values())
    check_product(pattern.count("%"), max((len(text_of(value)) for value in values), default=0) + 1000, len(pattern))
