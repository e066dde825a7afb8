"""What the layers of a model need from the format of their weights: a store that is filled, and one product."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from chairlift.loading.stored_weight import StoredWeight
from chairlift.loading.weight_cache.cache_file import PackedArray, PackedWeightArrays, UnusableCache

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.blocks.product import PanelWeight
    from chairlift.kernels.cpu.weights import TileWeight

FusionPart = Literal["norm", "norm and gate", "pairs", "rounded add", "add", "gate", "activation"]
"""What one kernel may do beside a product:

    norm            the norm before it, and a bias and an addition behind it, in layers that are fused as a whole
    norm and gate   the norm before it, and a gate behind it, in such layers
    pairs           the same with rows as pairs of 8-bit rows
    rounded add     an addition behind a product of rows in 8-bit floats
    add             an addition behind it, in other layers
    gate            a gate behind it, in other layers
    activation      an activation and a product of numbers behind it
"""


class Fusion(NamedTuple):
    """What is computed together with a product: activation(norm(x) Wᵀ + bias), gated or times numbers, and added."""

    bias: Tensor | None = None  # [out_features]
    squares: Tensor | None = None  # [T, parts]: the norm divides each row of x by these partial sums of squares
    eps: float = 0.0
    gated: bool = False  # the result is activation(its first half) * its second half
    activation: str = "silu"  # The gate has it, or the product that `times` multiplies; the name is the kernels' own.
    times: Tensor | None = None  # [T, out_features]: the result is activation(product) * times
    add_to: Tensor | None = None  # [T, out_features]: the result is added to it in place
    next_norm: Tensor | None = None  # [out_features]: the sum is wanted times this weight as well
    pairs: bool = False  # the result is wanted as pairs of 8-bit rows (as of `fp8.pairs_of`); x may be such
    scales: Tensor | None = None  # [T]: x is in 8-bit floats with these scales; a gated result will be, too

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing but the product and a bias."""
        return self.squares is None and self.add_to is None and not self.gated and self.times is None


ALONE = Fusion()


class Product(NamedTuple):
    rows: Tensor  # [T, out_features], or half of them behind a gate
    squares: Tensor | None = None  # [T, parts], with `add_to` on a GPU: partial sums of squares of its new rows
    scaled: Tensor | None = None  # the sum times `next_norm`, if the kernel computed it
    scales: Tensor | None = None  # [T]: those of rows in 8-bit floats


@dataclass(frozen=True, slots=True)
class FormatTraits:
    """What is true of all weights in a format."""

    stores_head: bool = True  # The language-model head and draft heads are stored in it, too.
    heads: tuple[str, ...] = ("none",)  # Else they are stored in the first of these that the device can have.
    rounded_head: str | None = None  # the format of a head that has to be rounded; None: this one
    stores_experts: bool = False  # models with experts can use it
    expert_blocks: str | None = None  # Each expert is a weight of this format, in blocks, on a CPU.
    rounds_experts: bool = False  # the experts' weights become 8-bit floats; without it they stay plain
    keeps_stored: bool = False  # weights stay as a quantized checkpoint stores them, where possible
    keeps_blocks: bool = False  # Weights on a CPU may become blocks, which the fused kernels multiply, too.
    devices: tuple[str, ...] = ("cpu", "cuda")  # It can be used on these.
    kv_dtype: torch.dtype | None = None  # The KV cache has it by default; None: the model's own
    table_dtype: torch.dtype | None = None  # The embedding table has it; None: the model's own
    tile_type: Callable[[], type[TileWeight]] | None = None  # what fused CPU kernels multiply, in `tiles`
    fuses: Mapping[FusionPart, int] = field(default_factory=dict)  # Each part is fused up to this many rows.
    fuses_invariantly: bool = False  # if `batch_invariant`, it fuses for any number of rows

    def becomes_blocks(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the weights of a model in `dtype` on `device` may become blocks."""
        return self.keeps_blocks and device.type == "cpu" and dtype is torch.float32


class WeightStorage:
    """The numbers of one linear map [out_features, in_features]: filled from a checkpoint, then packed."""

    name: ClassVar[str]

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        """`shared`: the tensor is also read elsewhere (a tied head and its embedding table)."""
        self.plain: Tensor | None = weight  # It is on the meta device until the first rows are filled.
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.shared = shared
        self.batch_invariant = False  # a row of a product must be the same, bit for bit, whatever other rows there are
        self.looked_up = False  # `rows` is called: the weight is an embedding table
        self.restored = False  # its packed arrays come from a weight cache: what a checkpoint fills is ignored
        self.tiles: TileWeight | None = None  # The weight is packed into them if its format has a `tile_type`.
        self.owns_tiles = True  # they are not part of the tiles of all layers
        self.panels: PanelWeight | None = None  # blocks of a GGUF file, as the kernels of a CPU multiply them

    @classmethod
    def empty(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A weight to be filled. Its memory is allocated with its first rows: a model never has all weights plain."""
        weight = cls(torch.empty(out_features, in_features, dtype=dtype, device="meta"))
        weight.device = device
        return weight

    def fill_rows(self, first: int, source: Tensor | StoredWeight) -> None:
        """Fill the rows from `first` on."""
        assert self.plain is not None
        if self.plain.is_meta:
            self.plain = torch.empty_like(self.plain, device=self.device)
        values = source if isinstance(source, Tensor) else source.dequantized()
        self.plain[first : first + len(values)].copy_(values)

    def scale_columns(self, factors: Tensor) -> bool:
        """Multiply each input column by a factor, before `pack`; False if that is not possible."""
        assert self.plain is not None
        self.plain.mul_(factors)
        return True

    def load(self, parts: Sequence[StoredWeight]) -> None:
        """Take weights that it accepts, instead of `pack`."""
        raise NotImplementedError

    def pack(self) -> None:
        """Called once all rows are filled: bring the weight into the layout that is multiplied. Maybe called twice."""
        raise NotImplementedError(f"the weight format {self.name!r} has no `pack`")

    @property
    def num_bytes(self) -> int:
        """The bytes that a product reads."""
        raise NotImplementedError(f"the weight format {self.name!r} has no `num_bytes`")

    @property
    def keeps_row_bits(self) -> bool:
        """Whether a row of a product on a CPU has the same bits beside other rows, also without `batch_invariant`."""
        return False

    @property
    def own_bytes(self) -> int:
        """The bytes of memory that no other part of the model counts."""
        return self.num_bytes

    def rows(self, indices: Tensor) -> Tensor:
        """Some rows of the weight [indices, in_features], as an embedding table is read; only with `keeps_blocks`."""
        assert self.plain is not None
        return self.plain[indices]

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight [out, in] and, of 8-bit floats, the scale of each row; None if it does not lie in memory so."""
        return None if self.plain is None else (self.plain, None)

    def packed_arrays(self) -> list[PackedArray]:
        """What a weight cache keeps of the packed weight; empty if the format does not support that."""
        return []

    def use_arrays(self, arrays: Sequence[PackedArray]) -> None:
        """Use these arrays as the packed weight; raises ValueError if they do not fit."""
        raise ValueError(f"{self.name} weights cannot be restored")


class WeightFormat(WeightStorage, ABC):
    """A weight as it is stored and multiplied.

    A format that rounds weights while they are loaded implements `pack` and `product`: the checkpoint fills `plain`,
    and `pack` replaces it. A format that can also compute with weights as quantized checkpoints store them implements
    `accepts` and `load`. A wrapper (an adapter, a shard) is a format that holds another one.
    """

    traits: ClassVar[FormatTraits] = FormatTraits()

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Why a model in `dtype` on `device` cannot have this format; empty if it can."""
        if device.type in (*cls.traits.devices, "meta"):  # A meta device has shapes only.
            return []
        return [f"it is for {' and '.join(cls.traits.devices)}, not for {device.type}"]

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        """About the bytes that a weight takes in this format, for estimates without weights."""
        return out_features * in_features * dtype.itemsize

    @classmethod
    def accepts(cls, parts: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it can compute with these weights of a checkpoint, one below the other, as they are stored."""
        return False

    def finalized(self) -> WeightFormat:
        """Called once all rows are filled: the packed weight that takes this one's place."""
        self.pack()
        return self

    def fuses(self, part: FusionPart, rows: int) -> bool:
        """Whether `product` of this number of rows does this in its kernel, faster than separate kernels."""
        most = self.traits.fuses.get(part, 0)
        if rows > most:
            return False
        from chairlift.kernels.triton.launch import tuned

        return tuned()

    @abstractmethod
    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        """x [T, in_features], at least one row, times the weight; all parts of `fusion` but its bias only as `fuses`
        allows them."""


Format = TypeVar("Format", bound=WeightFormat)


class WeightRows:
    """Some rows of a weight, as the target of a checkpoint's tensor."""

    def __init__(self, weight: WeightFormat, first: int, size: int) -> None:
        self._weight = weight
        self._first = first
        self.shape = torch.Size((size, weight.in_features))

    def copy_(self, source: Tensor | StoredWeight, /) -> None:
        if not self._weight.restored:
            self._weight.fill_rows(self._first, source)

    def placed(self, rows: Tensor) -> tuple[WeightFormat, int, Tensor]:
        """Where numbers of the checkpoint's rows belong: the weight, the first of its rows, and them in its order."""
        return self._weight, self._first, rows


def empty_in_place_of(weight: WeightFormat, format: type[Format]) -> Format:
    """An empty weight of another format that is used as this one."""
    other = format.empty(weight.out_features, weight.in_features, weight.dtype, weight.device)
    other.batch_invariant, other.looked_up = weight.batch_invariant, weight.looked_up
    return other


def restored_weight(weight: WeightFormat, packed: PackedWeightArrays) -> WeightFormat:
    """The weight that takes this one's place, with arrays of a weight cache; raises UnusableCache."""
    from chairlift.layers.formats import FORMATS

    try:
        restored = empty_in_place_of(weight, FORMATS.get(packed.format))
        restored.use_arrays(packed.arrays)
    except ValueError as error:  # An unknown format raises it, too.
        raise UnusableCache(str(error)) from None
    restored.restored = True
    return restored


def head_format(
    format: type[WeightFormat], dtype: torch.dtype, device: torch.device, *, quantize: bool
) -> type[WeightFormat]:
    """The format of the language-model head, and of draft heads; `quantize`: it has to be rounded."""
    from chairlift.errors import InvalidParameter
    from chairlift.layers.formats import FORMATS

    traits = format.traits
    if quantize and traits.rounded_head is not None:
        rounded = FORMATS.get(traits.rounded_head)
        if obstacles := rounded.obstacles(dtype, device):
            problem = f"is not possible with a quantized checkpoint: {'; '.join(obstacles)}"
            raise InvalidParameter("quantize_head", problem)
        return rounded
    if quantize or traits.stores_head:
        return format
    return next(FORMATS.get(name) for name in traits.heads if not FORMATS.get(name).obstacles(dtype, device))


def cpu_kernel_obstacles(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why weights cannot be multiplied by the compiled CPU kernels."""
    obstacles = []
    if device.type != "cpu":
        obstacles.append(f"it is for the CPU, not for {device.type}")
    if dtype is not torch.float32:
        obstacles.append(f"activations are float32 with it, not {dtype}")
    if importlib.util.find_spec("numba") is None:
        obstacles.append("numba is not installed")
    return obstacles


def count_formats(weights: Sequence[WeightFormat]) -> str:
    """How many linear maps have which format, for the startup report."""
    counts = Counter("not quantized" if weight.name == "none" else weight.name for weight in weights)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
