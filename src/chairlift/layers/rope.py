"""Rotary position embedding: pairs of a head's dimensions are rotated by angles that grow with the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.parts import Part
from chairlift.layers.rows import one_by_one


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries of late positions are multiplied by 1 + beta * log(1 + floor((position + offset) / length))."""

    beta: float
    length: int
    offset: int = 0

    def __call__(self, positions: Tensor) -> Tensor:
        """[T] -> [T] float32."""
        spans = torch.floor((positions.float() + self.offset) / self.length)
        return torch.log1p(spans).mul_(self.beta).add_(1.0)


@dataclass(frozen=True, slots=True)
class Rope:
    """The frequencies of a rotation. Layers with equal ropes share one rotation per step."""

    inv_freq: tuple[float, ...]  # radians per position, one per rotated pair; further dimensions are not rotated
    scale: float = 1.0  # multiplies cos and sin (the "attention factor" of yarn and longrope)
    query_scaling: QueryScaling | None = None


class Rotation(NamedTuple):
    """The angles of one step."""

    cos: Tensor  # [T, 1, pairs]
    sin: Tensor  # [T, 1, pairs]
    query_scale: Tensor | None = None  # [T, 1], of queries


class RotaryEmbedding(Part):
    """Turns positions into rotations.

    They are computed at every step instead of looked up in a table: for a decode batch this costs some ten
    microseconds, and no table grows with the longest context.
    """

    def __init__(self, rope: Rope, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
        self._scale = rope.scale
        self._query_scaling = rope.query_scaling
        self._dtype = dtype

    def __call__(self, positions: Tensor, by_pair: Tensor | None = None) -> Rotation:
        """Rotations for positions [T], or for `by_pair` [T, pairs] where pairs have positions of their own."""
        scaling = self._query_scaling
        query_scale = None if scaling is None else scaling(positions).to(self._dtype)[:, None]
        if on_gpu(positions.device) and len(self._inv_freq) and by_pair is None:
            from chairlift.kernels.triton.layers import rotation

            return Rotation(*rotation(positions, self._inv_freq, self._scale, self._dtype), query_scale)
        places = positions[:, None] if by_pair is None or not len(self._inv_freq) else by_pair
        angles = (places.float() * self._inv_freq)[:, None, :]
        cos, sin = (
            one_by_one(function, angles) if self.batch_invariant else function(angles)
            for function in (torch.cos, torch.sin)
        )
        return Rotation((cos * self._scale).to(self._dtype), (sin * self._scale).to(self._dtype), query_scale)


class HostRotary:
    """Turns positions in host memory into the angles of several ropes, with equally many pairs each.

    A decode step has so few angles that calling torch takes longer than computing them. Only cos and sin are torch's,
    so that they are rounded as in `RotaryEmbedding`.
    """

    def __init__(self, ropes: Sequence[Rope]) -> None:
        pairs = len(ropes[0].inv_freq) if ropes else 0
        self._inv_freq = np.array([rope.inv_freq for rope in ropes], dtype=np.float32).reshape(len(ropes), 1, pairs)
        self._scale = np.array([rope.scale for rope in ropes], dtype=np.float32).reshape(-1, 1, 1)

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[T], or [T, pairs] where pairs have positions of their own -> cos, sin [ropes, T, pairs] float32."""
        places = positions.astype(np.float32).reshape(len(positions), -1)
        angles = torch.from_numpy(places * self._inv_freq)
        return angles.cos().numpy() * self._scale, angles.sin().numpy() * self._scale


def rotate_(heads: Tensor, rotation: Rotation) -> None:
    """Rotate heads [T, n, head_dim] in place; dimension i of the first half is paired with i of the second."""
    cos, sin = rotation.cos, rotation.sin
    pairs = cos.shape[-1]
    first, second = heads[..., :pairs], heads[..., pairs : 2 * pairs]
    first_sin = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(first_sin)
