"""Stateless random numbers: each is a hash of (seed, position).

A request draws the same numbers however it is batched, preempted or recomputed, because they depend only on its seed
and on the index of the token to generate.
"""

from __future__ import annotations

from chairlift.core.sampling.params import MAX_SEED

_MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: consecutive multiples spread evenly over 64 bits
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # The factors of SplitMix64.
_STREAM = 0x9FB21C651E98DF25  # separates the streams of numbers for one token
_CHILDREN = 0xD1B54A32D192ED03  # separates the seeds of further completions from the numbers of the first one


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, for the token at `position` of the output.

    Stream 0 draws the token. The others are for draft tokens: 1 draws the draft, 2 decides on its acceptance.
    """
    return (_mix(_mix(seed ^ (stream * _STREAM & _MASK)) + (position + 1) * GOLDEN) >> 11) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with `n` > 1.

    Completion 0 keeps the seed itself, so that a larger `n` does not change the first completion.
    """
    if index == 0:
        return seed
    return _mix(_mix(seed ^ _CHILDREN) + index * GOLDEN) & MAX_SEED


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): flips about half the bits for any change."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * FACTORS[0]) & _MASK
    value = ((value ^ (value >> 27)) * FACTORS[1]) & _MASK
    return value ^ (value >> 31)
