"""Pairwise test design: few rows that contain every pair of values of different factors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import TypeVar

Value = TypeVar("Value")
Row = dict[str, Value]
Pair = frozenset[tuple[str, int]]


def pairwise_rows(factors: Mapping[str, Sequence[Value]], *, seed: int = 0, tries: int = 60) -> list[Row[Value]]:
    """Choose each row greedily as the best of some random ones. All pairs are covered; the result is deterministic."""
    rng = random.Random(seed)
    missing = _all_pairs(factors)
    rows: list[Row[Value]] = []
    while missing:
        pair = min(missing, key=sorted)  # every row covers at least this missing pair
        candidates = [_random_row(factors, dict(pair), rng) for _ in range(tries)]
        best = max(candidates, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


def _all_pairs(factors: Mapping[str, Sequence[Value]]) -> set[Pair]:
    return {
        frozenset({(one, i), (other, j)})
        for one, other in combinations(factors, 2)
        for i, j in product(range(len(factors[one])), range(len(factors[other])))
    }


def _random_row(factors: Mapping[str, Sequence[Value]], fixed: Mapping[str, int], rng: random.Random) -> dict[str, int]:
    return {name: fixed.get(name, rng.randrange(len(values))) for name, values in factors.items()}


def _pairs(row: Mapping[str, int]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}
