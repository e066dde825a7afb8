"""The inner loop of a product with one panel of blocks, in SIMD instructions that numba cannot express."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.kernels.cpu.blocks.panels import COLUMNS, KINDS, LINE, PANEL, STEP, STEPS, BlockKind
from chairlift.kernels.cpu.simd import (
    AVX2,
    F32,
    I8,
    I16,
    I32,
    I64,
    PLAIN,
    VNNI_512,
    InstructionSet,
    find_instruction_set,
    load,
    multiply_add,
    pick,
    prefetch_line,
    splat,
    store,
)

ISA = find_instruction_set()
SPAN_BYTES = 16  # It is known of 32 activations: scale, scale * sum, sums of both halves.
# A panel of a deep weight is larger than the L1 cache, so that every panel reads the rows from L2 again. With rows
# prefetched this many bytes ahead, products of one row with 5632 columns of Q4_K are a fifth faster; with 64 or 256
# bytes Q6_K is slower. Kinds of 8 bits read more of the panel for each row and are slower with any.
AHEAD = 128

BYTES, WORDS, NUMBERS = ir.VectorType(I8, 64), ir.VectorType(I32, PANEL), ir.VectorType(F32, PANEL)
HALF_BYTES, HALF_SHORTS, HALF_WORDS = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)


class _Operands(NamedTuple):
    sums: ir.Value  # [rows, PANEL] float32, written
    rows: ir.Value  # [rows, depth] int8
    row_stride: ir.Value
    spans: ir.Value  # [rows, depth / 32] of SPAN_BYTES
    span_stride: ir.Value
    units: ir.Value
    panel: ir.Value


@intrinsic(prefer_literal=True)
def block_tile(
    _: Any,
    kind: Any,
    rows: Any,
    sums: Any,
    left: Any,
    row_stride: Any,
    spans: Any,
    span_stride: Any,
    units: Any,
    panel: Any,
) -> Any:
    """sums [rows, 16] = rows times one panel. `kind` (its place in KINDS) and `rows` are constants; addresses and
    strides are in bytes."""
    found, count = list(KINDS.values())[kind.literal_value], rows.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        _Tile(b, ISA, found, count, _Operands(*args[2:])).emit()
        return context.get_dummy_value()

    return types.void(kind, rows, *[types.intp] * 7), generate


class _Tile:
    def __init__(self, b: ir.IRBuilder, isa: InstructionSet, kind: BlockKind, rows: int, of: _Operands) -> None:
        self.b, self.isa, self.kind, self.rows, self.of = b, isa, kind, rows, of
        # Without instructions for unsigned times signed bytes that keep 32 bits, large numbers are made signed.
        self.signed = isa is AVX2 and kind.offset == 128

    def emit(self) -> None:
        b, kind, of = self.b, self.kind, self.of
        zero = ir.Constant(NUMBERS, None)
        totals = [cgutils.alloca_once_value(b, zero) for _ in range(self.rows)]
        for total in totals:
            b.store(zero, total)
        with cgutils.for_range(b, of.units) as outer:
            unit = b.add(of.panel, b.mul(outer.index, I64(kind.unit_bytes)))
            factor = load_halves(b, unit) if kind.nested else None
            low_factor = load_halves(b, b.add(unit, I64(2 * PANEL))) if kind.nested and kind.has_min else None
            with cgutils.for_range(b, I64(kind.groups)) as inner:
                self._group(totals, unit, outer.index, inner.index, factor, low_factor)
        for row, total in enumerate(totals):
            store(b, b.load(total), b.add(of.sums, I64(row * 4 * PANEL)), 4)

    def _group(
        self,
        totals: list[ir.Value],
        unit: ir.Value,
        unit_index: ir.Value,
        group: ir.Value,
        factor: ir.Value | None,
        low_factor: ir.Value | None,
    ) -> None:
        b, kind, of = self.b, self.kind, self.of
        place = b.add(b.mul(unit_index, I64(kind.groups)), group)
        numbers = self._numbers(b.add(b.add(unit, I64(kind.numbers_at)), b.mul(group, I64(kind.group_bytes))))
        scales = b.add(b.add(unit, I64(kind.scales_at)), b.mul(group, I64(kind.scale_bytes)))
        parts = COLUMNS // kind.scale_columns
        steps = STEPS // parts
        fma = multiply_add(b, PANEL)
        spans = [
            b.add(b.add(of.spans, b.mul(of.span_stride, I64(row))), b.mul(place, I64(SPAN_BYTES)))
            for row in range(self.rows)
        ]
        rows = [
            b.add(b.add(of.rows, b.mul(of.row_stride, I64(row))), b.mul(place, I64(COLUMNS)))
            for row in range(self.rows)
        ]
        if kind.bits < 8:
            for row, span in zip(rows, spans, strict=True):
                prefetch_line(b, b.add(row, I64(AHEAD)), near=True)
                prefetch_line(b, b.add(span, I64(AHEAD * SPAN_BYTES // COLUMNS)), near=True)
        for part in range(parts):
            scale = self._scale(b.add(scales, I64(part * kind.part_bytes)), factor)
            found = [self._start(span, part, parts) for span in spans]
            for step in range(part * steps, (part + 1) * steps):
                for row in range(self.rows):
                    four = load(b, b.add(rows[row], I64(step * STEP)), I32, 1)
                    found[row] = self._dot(found[row], numbers[step], four)
            for row, total in enumerate(totals):
                both = b.fmul(scale, splat(b, load(b, spans[row], F32, 4), PANEL))
                b.store(b.call(fma, [b.sitofp(found[row], NUMBERS), both, b.load(total)]), total)
        if kind.has_min:
            mins = b.add(b.add(unit, I64(kind.mins_at)), b.mul(group, I64(kind.scale_bytes)))
            low = self._scale(mins, low_factor)
            for row, total in enumerate(totals):
                moment = splat(b, load(b, b.add(spans[row], I64(4)), F32, 4), PANEL)
                b.store(b.call(fma, [low, moment, b.load(total)]), total)

    def _start(self, span: ir.Value, part: int, parts: int) -> ir.Value:
        """The sum before the first product: minus the offset times the sum of the activations."""
        b, offset = self.b, self.kind.offset
        if not offset or self.signed:
            return ir.Constant(WORDS, None)
        total = load(b, b.add(span, I64(8 + 4 * part)), I32, 4)
        if parts == 1:
            total = b.add(total, load(b, b.add(span, I64(12)), I32, 4))
        return splat(b, b.mul(total, I32(-offset)), PANEL)

    def _scale(self, address: ir.Value, factor: ir.Value | None) -> ir.Value:
        b = self.b
        if factor is None:
            return load_halves(b, address)
        small = load(b, address, ir.VectorType(I8, PANEL), 1)
        wide = b.sext(small, WORDS) if self.kind.signed_scales else b.zext(small, WORDS)
        return b.fmul(b.sitofp(wide, NUMBERS), factor)

    # ---- the numbers of a group ---------------------------------------------------------------------------------

    def _numbers(self, address: ir.Value) -> list[ir.Value]:
        """The numbers of each step, one unsigned byte each."""
        b, bits = self.b, self.kind.bits
        lines = load_in_order(b, address, self.kind.group_bytes // LINE)
        if bits == 8:
            return lines
        found: list[ir.Value] = []
        for both in lines[: STEPS // 2]:
            found += [b.and_(both, constant(15)), b.and_(moved_bits(b, both, -4), constant(15))]
        if bits > 4:
            planes = lines[STEPS // 2 :]
            found = [b.or_(low, self._high_bits(planes, step)) for step, low in enumerate(found)]
        return found if self.kind.values is None else [self._look_up(number) for number in found]

    def _high_bits(self, planes: list[ir.Value], step: int) -> ir.Value:
        """The bits above the lowest four of a step's numbers, in their place."""
        b, more = self.b, self.kind.bits - 4
        per_plane = 8 // more  # steps that share 64 bytes
        moved = moved_bits(b, planes[step // per_plane], 4 - more * (step % per_plane))
        return b.and_(moved, constant(16 * (2**more - 1)))

    def _look_up(self, numbers: ir.Value) -> ir.Value:
        """Replace numbers of four bits by the values that they stand for."""
        b, values = self.b, self.kind.values
        assert values is not None
        if self.isa is PLAIN:
            found = constant(values[0])
            for number, value in enumerate(values[1:], 1):
                found = b.select(b.icmp_unsigned("==", numbers, constant(number)), constant(value), found)
            return found
        if self.isa is VNNI_512:
            return _call(b, "llvm.x86.avx512.pshuf.b.512", BYTES, [ir.Constant(BYTES, values * 4), numbers])
        table = ir.Constant(HALF_BYTES, values * 2)
        halves = [_call(b, "llvm.x86.avx2.pshuf.b", HALF_BYTES, [table, half]) for half in _halves(b, numbers)]
        return _joined(b, *halves)

    # ---- dot products -------------------------------------------------------------------------------------------

    def _dot(self, total: ir.Value, numbers: ir.Value, four: ir.Value) -> ir.Value:
        """Add the products of four unsigned numbers per channel with four signed activations (a 32-bit word)."""
        b = self.b
        if self.isa is VNNI_512:
            return _dot_product(b, total, numbers, b.bitcast(splat(b, four, PANEL), BYTES))
        row = b.bitcast(splat(b, four, 8), HALF_BYTES)
        halves = []
        for words, half in zip(_halves(b, total), _halves(b, numbers), strict=True):
            if self.isa is PLAIN:
                halves.append(b.add(words, _plain_dot(b, half, row)))
            elif self.isa is AVX2:
                halves.append(b.add(words, self._pairs(half, row)))
            else:
                halves.append(_dot_product(b, words, half, row))
        return _joined(b, *halves)

    def _pairs(self, numbers: ir.Value, row: ir.Value) -> ir.Value:
        """Dot products by sums of two in 16 bits: they do not overflow with numbers of seven bits, nor with signed ones
        whose sign is moved to the activation."""
        b = self.b
        if self.signed:
            centred = b.sub(numbers, ir.Constant(HALF_BYTES, [128] * 32))
            row = _call(b, "llvm.x86.avx2.psign.b", HALF_BYTES, [row, centred])
            negative = b.icmp_signed("<", centred, ir.Constant(HALF_BYTES, None))
            numbers = b.select(negative, b.neg(centred), centred)
        shorts = _call(b, "llvm.x86.avx2.pmadd.ub.sw", HALF_SHORTS, [numbers, row])
        return _call(b, "llvm.x86.avx2.pmadd.wd", HALF_WORDS, [shorts, ir.Constant(HALF_SHORTS, [1] * 16)])


def _dot_product(b: ir.IRBuilder, total: ir.Value, numbers: ir.Value, row: ir.Value) -> ir.Value:
    bits = 32 * total.type.count
    if llvmlite.binding.llvm_version_info[0] < 22:  # LLVM 22 changed the type of the operands
        numbers, row = b.bitcast(numbers, total.type), b.bitcast(row, total.type)
    return _call(b, f"llvm.x86.avx512.vpdpbusd.{bits}", total.type, [total, numbers, row])


def _plain_dot(b: ir.IRBuilder, numbers: ir.Value, row: ir.Value) -> ir.Value:
    words = ir.VectorType(I32, 32)
    products = b.mul(b.zext(numbers, words), b.sext(row, words))
    twos = b.add(pick(b, products, products, range(0, 32, 2)), pick(b, products, products, range(1, 32, 2)))
    return b.add(pick(b, twos, twos, range(0, 16, 2)), pick(b, twos, twos, range(1, 16, 2)))


def load_halves(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Load 16 finite float16 numbers as float32."""
    if ISA is not PLAIN:
        return b.fpext(load(b, address, ir.VectorType(ir.HalfType(), PANEL), 2), NUMBERS)
    # Without such an instruction, LLVM calls a function that is not there: move the bits, then mend the exponent.
    bits = b.zext(load(b, address, ir.VectorType(I16, PANEL), 2), WORDS)

    def all_of(number: int) -> ir.Constant:
        return ir.Constant(WORDS, [number] * PANEL)

    size = b.bitcast(b.shl(b.and_(bits, all_of(0x7FFF)), all_of(13)), NUMBERS)
    size = b.fmul(size, ir.Constant(NUMBERS, [2.0**112] * PANEL))
    sign = b.shl(b.and_(bits, all_of(0x8000)), all_of(16))
    return b.bitcast(b.or_(b.bitcast(size, WORDS), sign), NUMBERS)


def load_in_order(b: ir.IRBuilder, address: ir.Value, lines: int) -> list[ir.Value]:
    """Load adjacent lines, in this order: the prefetchers of a CPU follow ascending addresses, and LLVM would reorder
    the loads by the first use of their values."""
    found = []
    fence = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True)
    for line in range(lines):
        found.append(load(b, b.add(address, I64(LINE * line)), BYTES, 1))
        b.call(fence, [])
    return found


def moved_bits(b: ir.IRBuilder, numbers: ir.Value, places: int) -> ir.Value:
    """Shift bytes to the left, or to the right if `places` is negative. Bits that cross into another byte are to be
    masked: CPUs shift 16 bits, not 8, and LLVM's substitute takes the place of a multiplication."""
    shorts = ir.VectorType(I16, numbers.type.count // 2)
    whole, amount = b.bitcast(numbers, shorts), ir.Constant(shorts, [abs(places)] * shorts.count)
    return b.bitcast(b.shl(whole, amount) if places > 0 else b.lshr(whole, amount), numbers.type)


def constant(value: int) -> ir.Constant:
    return ir.Constant(BYTES, [value] * 64)


def _halves(b: ir.IRBuilder, vector: ir.Value) -> tuple[ir.Value, ir.Value]:
    count = vector.type.count
    return pick(b, vector, vector, range(count // 2)), pick(b, vector, vector, range(count // 2, count))


def _joined(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    return pick(b, low, high, range(2 * low.type.count))


def _call(b: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), args)
