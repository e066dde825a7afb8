"""Vectorised version of `core.sampling.randomness`."""

from __future__ import annotations

import numpy as np

from chairlift.core.sampling.randomness import FACTORS, GOLDEN


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`uniform(seed, position)` for each pair; sums and products of uint64 wrap around, as SplitMix64 requires.

    seeds: [R] uint64; positions: [R]; result: [R] float64."""
    spread = (positions + 1).astype(np.uint64) * np.uint64(GOLDEN)
    numbers: np.ndarray = (_mix(_mix(seeds) + spread) >> np.uint64(11)) * 2.0**-53
    return numbers


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(FACTORS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(FACTORS[1])
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
