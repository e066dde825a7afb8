"""What the layers of a model need from the format of their weights."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from chairlift.layers.parts import Targets
from chairlift.loading.stored_weight import StoredWeight
from chairlift.loading.weight_cache.cache_file import PackedArray, PackedWeightArrays, UnusableCache

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.weights import TileWeight


class ScaledRows(NamedTuple):
    """A matrix in 8-bit floats with one scale per row."""

    numbers: Tensor  # [rows, size] e4m3
    scales: Tensor  # [rows] float32: a row is its numbers times its scale

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


class WeightFormat(ABC):
    """The weight of one linear map [out_features, in_features], as it is stored and multiplied.

    A format that rounds weights while they are loaded implements `pack` and `multiply`: the checkpoint fills `plain`,
    and `pack` replaces it. A format that can also compute with weights as quantized checkpoints store them implements
    `accepts` and `load`. A wrapper (an adapter, a shard) is a format that holds another one.
    """

    name: ClassVar[str]
    stores_head: ClassVar[bool] = True  # the language-model head and draft heads are stored in it, too
    stores_experts: ClassVar[bool] = False  # models with experts can use it
    rounds_experts: ClassVar[bool] = False  # the experts' weights become 8-bit floats; without it they stay plain
    keeps_stored: ClassVar[bool] = False  # weights stay as a quantized checkpoint stores them, where possible
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")  # where it can be used
    kv_dtype: ClassVar[torch.dtype | None] = None  # of the KV cache by default; None: the model's own
    packs_tiles: ClassVar[bool] = False  # it has `tile_type`, `pack_into` and `tiles`, which fused CPU kernels multiply
    keeps_blocks: ClassVar[bool] = False  # on a CPU, weights may become blocks, which the fused kernels multiply, too
    most_fused_rows: ClassVar[int] = 0  # on a GPU, steps with at most this number of rows use `fused`
    fuses_invariantly: ClassVar[bool] = False  # if `batch_invariant`, `fused` does so for any number of rows
    rounds_rows: ClassVar[bool] = False  # on a GPU, it has `multiply_rounded` for steps of more rows

    batch_invariant = False  # a row of a product must be the same, bit for bit, whatever the other rows are
    looked_up = False  # `rows` is called: the weight is an embedding table
    restored = False  # its packed arrays come from a weight cache: what a checkpoint fills is ignored
    tiles: TileWeight | None = None

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        """`shared`: the tensor is also read elsewhere (a tied head and its embedding table)."""
        self.plain: Tensor | None = weight  # on the meta device until the first rows are filled
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.shared = shared

    @classmethod
    def empty(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A weight to be filled. Its memory is allocated with its first rows: a model never has all weights plain."""
        weight = cls(torch.empty(out_features, in_features, dtype=dtype, device="meta"))
        weight.device = device
        return weight

    @classmethod
    def becomes_blocks(cls, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the weights of a model in `dtype` on `device` may become blocks."""
        return cls.keeps_blocks and device.type == "cpu" and dtype is torch.float32

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Why a model in `dtype` on `device` cannot have this format; empty if it can."""
        return []

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        """About the bytes that a weight takes in this format, for estimates without weights."""
        return out_features * in_features * dtype.itemsize

    @classmethod
    def for_head(cls, dtype: torch.dtype, device: torch.device, *, quantize: bool) -> type[WeightFormat]:
        """The format of the language-model head, and of draft heads; `quantize`: it must be this one."""
        from chairlift.layers.formats.none import PlainWeight

        return cls if cls.stores_head or quantize else PlainWeight

    @staticmethod
    def embedding(table: Tensor) -> Tensor:
        """The embedding table as it is kept."""
        return table

    def targets(self, names: Sequence[str], sizes: Sequence[int]) -> Targets:
        """What a checkpoint fills, by name; `sizes` are the output features of each name."""
        first = 0
        for name, size in zip(names, sizes, strict=True):
            yield f"{name}.weight", WeightRows(self, first, size)
            first += size

    def fill_rows(self, first: int, source: Tensor | StoredWeight) -> None:
        """Fill the rows from `first` on."""
        assert self.plain is not None
        if self.plain.is_meta:
            self.plain = torch.empty_like(self.plain, device=self.device)
        values = source if isinstance(source, Tensor) else source.dequantized()
        self.plain[first : first + len(values)].copy_(values)

    @classmethod
    def accepts(cls, parts: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it can compute with these weights of a checkpoint, one below the other, as they are stored."""
        return False

    def load(self, parts: Sequence[StoredWeight]) -> None:
        """Take weights that it accepts, instead of `pack`."""
        raise NotImplementedError

    def finalized(self) -> WeightFormat:
        """Called once all targets are filled: the packed format that multiplies."""
        self.pack()
        return self

    @abstractmethod
    def pack(self) -> None:
        """Called once all targets are filled: bring the weight into the layout that is multiplied."""

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in_features], at least one row -> x Wᵀ + bias [T, out_features]."""

    def rows(self, indices: Tensor) -> Tensor:
        """Some rows of the weight [indices, in_features], as an embedding table is read; only with `keeps_blocks`."""
        assert self.plain is not None
        return self.plain[indices]

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The bytes that a product reads."""

    @property
    def own_bytes(self) -> int:
        """The bytes of memory that no other part of the model counts."""
        return self.num_bytes

    def packed_arrays(self) -> list[PackedArray]:
        """What a weight cache keeps of the packed weight; empty if the format does not support that."""
        return []

    def restored_from(self, packed: PackedWeightArrays) -> WeightFormat:
        """The weight that takes this one's place, with arrays of a weight cache; raises UnusableCache."""
        from chairlift.layers.formats import FORMATS

        try:
            weight = FORMATS.get(packed.format).empty(self.out_features, self.in_features, self.dtype, self.device)
            weight.batch_invariant, weight.looked_up = self.batch_invariant, self.looked_up
            weight.use_arrays(packed.arrays)
        except ValueError as error:  # also for an unknown format
            raise UnusableCache(str(error)) from None
        weight.restored = True
        return weight

    def use_arrays(self, arrays: Sequence[PackedArray]) -> None:
        """Use these arrays as the packed weight; raises ValueError if they do not fit."""
        raise ValueError(f"{self.name} weights cannot be restored")

    def adds_in_place(self, x: Tensor) -> bool:
        """Whether `add_to_` does the product with `x` in the same kernel as an addition."""
        return False

    def add_to_(self, total: Tensor, x: Tensor) -> None:
        """total [T, out_features] += x Wᵀ, where `adds_in_place` allows it."""
        raise NotImplementedError

    def sums_squares(self, x: Tensor) -> bool:
        """On a GPU, whether `fused` of x adds to a tensor and returns the sums of squares of its rows, faster than
        separate kernels."""
        return False

    def gates_in_place(self, x: Tensor) -> bool:
        """Whether one kernel does the product with `x` and the gate behind it."""
        return False

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """activation(first half of the product) * second half, where `gates_in_place` allows it."""
        raise NotImplementedError

    def activates_in_place(self, x: Tensor) -> bool:
        """Whether one kernel does the product with `x`, an activation, and a product of numbers with its result."""
        return False

    def activated(self, x: Tensor, activation: str, times: Tensor) -> Tensor:
        """activation(product) * times [T, out_features], where `activates_in_place` allows it."""
        raise NotImplementedError

    def scale_columns(self, factors: Tensor) -> bool:
        """Multiply each input column by a factor, before `pack`; False if that is not possible."""
        assert self.plain is not None
        self.plain.mul_(factors)
        return True

    def fuses_rows(self, rows: int, *, gated: bool) -> bool:
        """Whether `fused` is the fastest product of `rows` rows; called up to `most_fused_rows`."""
        return True

    def fused(
        self,
        x: Tensor,
        *,
        squares: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The product with the norm before it and the gate or the addition after it, as
        `kernels.triton.products.product`."""
        raise NotImplementedError

    def splits_rows(self, rows: int) -> bool:
        """Whether it has `fused_split` and that is faster than `fused`."""
        return False

    def fused_split(
        self,
        x: Tensor,
        *,
        squares: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`fused`, with the result as pairs of 8-bit rows (see `kernels.triton.fp8.pairs_of`); x may be such pairs."""
        raise NotImplementedError

    def fused_scaled(self, x: Tensor, *, add_to: Tensor, next_norm: Tensor) -> tuple[Tensor | None, Tensor]:
        """Add the product to `add_to`; return the partial sums of squares of its rows, and it times `next_norm`."""
        squares = self.fused(x, add_to=add_to)[1]
        return squares, add_to * next_norm.to(add_to.dtype)

    def adds_rounded(self, rows: int) -> bool:
        """Whether `multiply_rounded` of `rows` rows does an addition in the same kernel."""
        return False

    def multiply_rounded(
        self, rows: ScaledRows, bias: Tensor | None, *, gated: bool = False, add_to: Tensor | None = None
    ) -> Tensor | ScaledRows:
        """The product of rows in 8-bit floats; the result of a gated product is rounded, too."""
        raise NotImplementedError

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight [out, in] and, of 8-bit floats, the scale of each row; None if it does not lie in memory so."""
        return None if self.plain is None else (self.plain, None)

    @classmethod
    def tile_type(cls) -> type[TileWeight]:
        """The tiles of the fused CPU kernels; only with `packs_tiles`."""
        raise NotImplementedError

    def pack_into(self, tiles: TileWeight) -> None:
        """Make `pack` use this memory; only with `packs_tiles`."""
        raise NotImplementedError


class WeightRows:
    """Some rows of a weight, as the target of a checkpoint's tensor."""

    def __init__(self, weight: WeightFormat, first: int, size: int) -> None:
        self._weight = weight
        self._first = first
        self.shape = torch.Size((size, weight.in_features))

    def copy_(self, source: Tensor | StoredWeight, /) -> None:
        if not self._weight.restored:
            self._weight.fill_rows(self._first, source)


def cpu_kernel_obstacles(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why weights cannot be multiplied by the compiled CPU kernels."""
    found = []
    if device.type != "cpu":
        found.append(f"it is for the CPU, not for {device.type}")
    if dtype is not torch.float32:
        found.append(f"activations are float32 with it, not {dtype}")
    if importlib.util.find_spec("numba") is None:
        found.append("numba is not installed")
    return found


def count_formats(weights: Sequence[WeightFormat]) -> str:
    """How many linear maps have which format, for the startup report."""
    counts = Counter("not quantized" if weight.name == "none" else weight.name for weight in weights)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
