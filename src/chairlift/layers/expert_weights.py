"""The weights of one product of all experts: plain, 8-bit floats, or 4-bit floats as their checkpoint stores them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import ALONE, Fusion, WeightFormat
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.layers.formats.checkpoint import CheckpointWeight
from chairlift.layers.formats.fp8 import FP8, FP8Weight, round_rows
from chairlift.layers.linear import Build
from chairlift.layers.parts import Part
from chairlift.loading.stored_weight import GROUP, MicroscaledFloats, ScaledFloats, StoredWeight

if TYPE_CHECKING:
    from chairlift.kernels.triton.experts.products import ExpertMatrix


Form = Literal["plain", "fp8", "mxfp4"]


class ExpertWeights(Part):
    """[experts, out, in]; memory is allocated when the first rows come.

    `keeps`: the forms in which rows stay if a checkpoint stores them so; `rounds`: all rows become 8-bit floats. Every
    row of 8-bit floats has a scale; rows that a checkpoint stores with scales per block are rounded again. 4-bit floats
    with a power of two per 32 columns (MXFP4) lie in memory as `packed` says.
    """

    in_blocks = False  # the checkpoint stored them in blocks of a GGUF file, which a CPU multiplies

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keeps: frozenset[Form] = frozenset(),
        rounds: bool = False,
    ) -> None:
        self.shape = torch.Size((num_experts, out_features, in_features))
        self.dtype = dtype
        self.device = device
        self.form: Form = "fp8" if rounds else "plain"  # The rows that were filled have this form.
        self._numbers: Tensor | None = None
        self._scales: Tensor | None = None
        self._keeps, self._rounds = keeps, rounds

    @property
    def microscaled_bytes(self) -> int:
        """Their bytes where they stay as an MXFP4 checkpoint stores them, if their shape allows it."""
        if not can_pack(*self.shape[1:]):
            return self.shape.numel() * self.dtype.itemsize
        return self.shape[:2].numel() * num_chunks(self.shape[2]) * (2 * RUN + 4)

    @property
    def plain(self) -> Tensor:
        """[experts, out, in], if the weights are plain."""
        assert self.form == "plain"
        if self._numbers is None:
            self._numbers = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self._numbers

    @property
    def matrix(self) -> ExpertMatrix:
        """What the kernels multiply."""
        from chairlift.kernels.triton.experts.products import ExpertMatrix

        if self._numbers is None:
            self._allocate(self.form)
        assert self._numbers is not None
        return ExpertMatrix(self._numbers, self._scales)

    def multiply(self, expert: int, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows [T, in] times the plain weight of an expert -> [T, out]; bias [experts, out]."""
        return F.linear(rows, self.plain[expert], None if bias is None else bias[expert])

    @property
    def num_bytes(self) -> int:
        if self._numbers is not None:
            return self._numbers.nbytes + (0 if self._scales is None else self._scales.nbytes)
        if self._rounds:
            return self.shape.numel() + 4 * self.shape[:2].numel()  # a scale for each row
        return self.shape.numel() * self.dtype.itemsize

    def rows(self, expert: int, first: int, count: int) -> ExpertRows:
        """What a checkpoint fills with some rows of an expert."""
        return ExpertRows(self, expert, first, count)

    def fill(self, expert: int, first: int, source: Tensor | StoredWeight) -> None:
        form = self._form_of(source)
        if self._numbers is None:
            self._allocate(form)
        elif form != self.form:
            self._become_plain()
        rows = slice(first, first + source.shape[0])
        if self.form == "plain":
            self.plain[expert, rows].copy_(source if isinstance(source, Tensor) else source.dequantized())
            return
        assert self._numbers is not None
        assert self._scales is not None
        if self.form == "mxfp4":
            assert isinstance(source, StoredWeight)
            stored = source.as_microscaled()
            assert stored is not None
            words, exponents = packed(stored.to(self.device))
            panel = first // PANEL
            self._numbers[expert, panel : panel + len(words)] = words.to(self.device)
            self._scales[expert, :, rows] = exponents.to(self.device)
        else:
            numbers, scales = _round(source, self.device)
            # As bytes: not every operation of torch takes 8-bit floats.
            self._numbers.view(torch.uint8)[expert, rows] = numbers.view(torch.uint8).to(self.device)
            self._scales[expert, rows] = scales.to(self.device)

    def _form_of(self, source: Tensor | StoredWeight) -> Form:
        """The form in which rows are kept if no others were filled yet."""
        if self._rounds:
            return "fp8"
        if isinstance(source, Tensor):
            return "plain"
        form: Form = "plain"
        if source.as_microscaled() is not None and can_pack(source.shape[0], self.shape[2]):
            form = "mxfp4"
        elif isinstance(source, ScaledFloats) and source.numbers.dtype is FP8:
            form = "fp8"
        return form if form in self._keeps else "plain"

    def _allocate(self, form: Form) -> None:
        experts, out_features, in_features = self.shape
        self.form = form
        if form == "plain":
            self._numbers = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        elif form == "fp8":
            self._numbers = torch.zeros(self.shape, dtype=torch.uint8, device=self.device).view(FP8)
            self._scales = torch.zeros(experts, out_features, device=self.device)
        else:
            chunks = num_chunks(in_features)
            words = experts, out_features // PANEL, chunks, PANEL, RUN
            self._numbers = torch.zeros(words, dtype=torch.int16, device=self.device)
            self._scales = torch.zeros(experts, chunks, out_features, dtype=torch.int32, device=self.device)

    def _become_plain(self) -> None:
        """Rows came in different forms."""
        form, numbers, scales = self.form, self._numbers, self._scales
        if scales is None:
            return
        assert numbers is not None
        self._numbers = self._scales = None
        self._allocate("plain")
        for expert, plain in enumerate(self.plain):
            plain.copy_(_values(form, numbers[expert], scales[expert], self.shape[2]))

    def dequantized(self, expert: int) -> Tensor:
        """[out, in]: the values of an expert's weights."""
        if self._scales is None:
            return self.plain[expert]
        assert self._numbers is not None
        return _values(self.form, self._numbers[expert], self._scales[expert], self.shape[2])


class ExpertRows:
    """Some rows of an expert's matrix, as a target for a checkpoint's tensor."""

    def __init__(self, weights: ExpertWeights, expert: int, first: int, count: int) -> None:
        self._weights = weights
        self._expert = expert
        self._first = first
        self.shape = torch.Size((count, weights.shape[2]))

    def copy_(self, source: Tensor | StoredWeight, /) -> None:
        self._weights.fill(self._expert, self._first, source)


class BlockExperts(ExpertWeights):
    """On a CPU, a weight of its own for each expert: as a checkpoint stores it, where it has blocks or integers of 4
    bits, and else plain; or in a format that rounds it to blocks."""

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat] = CheckpointWeight,
    ) -> None:
        super().__init__(num_experts, out_features, in_features, dtype=dtype, device=device)
        self._rounded = format is not CheckpointWeight
        sizes = out_features, in_features, dtype, device
        self._experts: list[WeightFormat] = [format.empty(*sizes) for _ in range(num_experts)]
        self._missing = [out_features] * num_experts  # rows that are not filled yet

    def fill(self, expert: int, first: int, source: Tensor | StoredWeight) -> None:
        self._experts[expert].fill_rows(first, source)
        self._missing[expert] -= source.shape[0]
        if self._rounded and not self._missing[expert]:  # Memory never holds all experts plain.
            self._experts[expert] = self._experts[expert].finalized()

    def finalize(self) -> None:
        self._experts = [weight.finalized() for weight in self._experts]
        self.in_blocks = all(weight.panels is not None for weight in self._experts)

    def multiply(self, expert: int, rows: Tensor, bias: Tensor | None) -> Tensor:
        fusion = ALONE if bias is None else Fusion(bias[expert])
        return self._experts[expert].product(rows, fusion).rows

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self._experts)


def kept_forms(format: type[WeightFormat], dtype: torch.dtype, device: torch.device) -> frozenset[Form]:
    """The forms in which a checkpoint's weights stay, if the layers have this format."""
    if not format.traits.keeps_stored or not on_gpu(device):
        return frozenset()
    return frozenset({"mxfp4"} if FP8Weight.obstacles(dtype, device) else {"mxfp4", "fp8"})


def empty_experts(num_experts: int, out_features: int, in_features: int, build: Build) -> ExpertWeights:
    """Weights to be filled, which stay in those forms of a checkpoint that the device computes with."""
    format, dtype, device = build.format, build.dtype, build.device
    keeps = kept_forms(format, dtype, device)
    sizes = num_experts, out_features, in_features
    blocks = format.traits.expert_blocks
    if blocks is not None and not BlockWeight.obstacles(dtype, device):
        return BlockExperts(*sizes, dtype=dtype, device=device, format=FORMATS.get(blocks))
    if format.traits.keeps_stored and not keeps and not BlockWeight.obstacles(dtype, device):
        return BlockExperts(*sizes, dtype=dtype, device=device)
    return ExpertWeights(*sizes, dtype=dtype, device=device, keeps=keeps, rounds=format.traits.rounds_experts)


def _values(form: Form, numbers: Tensor, scales: Tensor, columns: int) -> Tensor:
    """[out, in] in float32, of rows in 8- or 4-bit floats."""
    if form == "mxfp4":
        return unpacked(numbers, scales, columns).dequantized()
    return numbers.float() * scales[:, None]


def _round(source: Tensor | StoredWeight, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows in 8-bit floats, and the scale of each."""
    if isinstance(source, ScaledFloats) and source.numbers.dtype is FP8 and source.row_scales is not None:
        return source.numbers, source.row_scales
    values = (source if isinstance(source, Tensor) else source.dequantized()).to(device)
    if values.is_meta:  # a GPU that is only described: there is nothing to round
        return torch.empty_like(values, dtype=torch.uint8), values.new_empty(len(values), dtype=torch.float32)
    return round_rows(values)


PANEL = 16  # rows stored one behind the other
RUN = GROUP  # words of a chunk
CHUNK = 4 * RUN  # columns
# The scales that are stored are those of the checkpoint times 2 ** -65, as the exponent of a bfloat16: with the
# smallest number of 4 bits, whose bits are those of 2 ** -127, they stay within its range.
EXPONENT = 62
_PLACES = ((15, 6), (12, 3), (14, 9), (13, 0))  # The sign and the other bits of each number are shifted by these.


def can_pack(rows: int, columns: int) -> bool:
    return rows % PANEL == 0 and columns % GROUP == 0


def num_chunks(columns: int) -> int:
    return -(-columns // CHUNK)


def packed(weight: MicroscaledFloats) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> words [panels, chunks, PANEL, RUN] int16, exponents [chunks, rows] int32, four bytes each.

    A chunk of a row is 128 columns in 32 words of 16 bits: word i has columns i, i + 32, i + 64 and i + 96, one of each
    group of 32 columns that share a scale. So a tile of words is four tiles of the weight, and no number moves to
    another thread. The bits of a number lie where few operations move them to those of a bfloat16:

        bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
        number   0  2  3  1  2  2  2  0  0  0  1  1  1  3  3  3    the sign first, then two of exponent, one of mantissa

    16 rows of a chunk are stored one behind the other: a program reads memory in sequence.
    """
    columns = weight.shape[1]
    missing = num_chunks(columns) * 4 - columns // GROUP
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).flatten(-2)  # [rows, groups, 32]
    chunks = F.pad(codes, (0, 0, 0, missing)).unflatten(1, (-1, 4)).int()  # [rows, chunks, 4, 32]
    words = torch.zeros_like(chunks[:, :, 0])
    for index, (sign, rest) in enumerate(_PLACES):
        code = chunks[:, :, index]
        words |= (code >> 3) << sign | (code & 7) << rest
    exponents = F.pad((weight.exponents.int() + EXPONENT).clamp(max=254), (0, missing)).to(torch.uint8)
    return (
        words.to(torch.int16).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous(),
        exponents.contiguous().view(torch.int32).t().contiguous(),
    )


def unpacked(words: Tensor, exponents: Tensor, columns: int) -> MicroscaledFloats:
    """The inverse of `packed`."""
    chunks = words.transpose(1, 2).flatten(0, 1).int()  # [rows, chunks, 32]
    numbers = [(chunks >> sign & 1) << 3 | chunks >> rest & 7 for sign, rest in _PLACES]
    codes = torch.stack(numbers, dim=2).flatten(1, 2)[:, : columns // GROUP].to(torch.uint8).unflatten(-1, (-1, 2))
    stored = exponents.t().flatten().view(torch.uint8).unflatten(0, (len(chunks), -1))[:, : columns // GROUP]
    return MicroscaledFloats(codes[..., 0] | codes[..., 1] << 4, (stored.int() - EXPONENT).to(torch.uint8))
