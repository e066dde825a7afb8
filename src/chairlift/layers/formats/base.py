"""What the layers of a model need from the format of their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from chairlift.layers.parts import Targets

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.int8 import PackedWeight


class WeightFormat(ABC):
    """The weight of one linear map [out_features, in_features], as it is stored and multiplied.

    A format that rounds weights while they are loaded implements `pack` and `multiply`: the checkpoint fills `plain`,
    and `pack` replaces it. A format whose checkpoints hold other tensors (scales, packed integers) also overrides
    `empty` and `targets`, and has no `plain`. A wrapper (an adapter, a shard) is a format that holds another one.
    """

    name: ClassVar[str]
    stores_head: ClassVar[bool] = True  # the language-model head and draft heads are stored in it, too
    stores_experts: ClassVar[bool] = False  # models with experts can use it; the experts themselves stay plain
    kv_dtype: ClassVar[torch.dtype | None] = None  # of the KV cache by default; None: the model's own
    packs_tiles: ClassVar[bool] = False  # it has `pack_into` and `tiles`, which the fused CPU kernels multiply
    keeps_plain: ClassVar[bool] = False  # on a GPU `plain` stays, and fused kernels may multiply it

    batch_invariant = False  # a row of a product must be the same, bit for bit, whatever the other rows are
    tiles: PackedWeight | None = None

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        """`shared`: the tensor is also read elsewhere (a tied head and its embedding table)."""
        self.plain: Tensor | None = weight
        self.out_features, self.in_features = weight.shape
        self.shared = shared

    @classmethod
    def empty(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Self:
        return cls(torch.empty(out_features, in_features, dtype=dtype, device=device))

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Why a model in `dtype` on `device` cannot have this format; empty if it can."""
        return []

    @staticmethod
    def embedding(table: Tensor) -> Tensor:
        """The embedding table as it is kept."""
        return table

    def targets(self, names: Sequence[str], sizes: Sequence[int]) -> Targets:
        """The tensors that a checkpoint fills, by name; `sizes` are the output features of each name."""
        assert self.plain is not None
        for name, part in zip(names, self.plain.split(list(sizes)), strict=True):
            yield f"{name}.weight", part

    @abstractmethod
    def pack(self) -> None:
        """Called once all targets are filled: bring the weight into the layout that is multiplied."""

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in_features], at least one row -> x Wᵀ + bias [T, out_features]."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The bytes that a product reads."""

    @property
    def own_bytes(self) -> int:
        """The bytes of memory that no other part of the model counts."""
        return self.num_bytes

    def adds_in_place(self, x: Tensor) -> bool:
        """Whether `add_to_` does the product with `x` in the same kernel as an addition."""
        return False

    def add_to_(self, total: Tensor, x: Tensor) -> None:
        """total [T, out_features] += x Wᵀ, where `adds_in_place` allows it."""
        raise NotImplementedError

    def pack_into(self, tiles: PackedWeight) -> None:
        """Make `pack` use this memory; only with `packs_tiles`."""
        raise NotImplementedError
