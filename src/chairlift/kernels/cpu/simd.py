"""Matrix product tiles in SIMD instructions that numba cannot express.

Each tile is a few lines of LLVM IR, inlined into the kernels that use it, so no compiler is needed at installation.
A tile is the inner loop of a matrix product with all its sums in registers. Arrays are passed by address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

PANEL = 16  # adjacent columns of a packed weight
GROUP = 4  # adjacent elements of one column: as many as one dot-product instruction adds
SPAN = 64  # activations of a row that share a scale
OFFSET = 128  # weights are stored unsigned, as the dot-product instructions require
F32_ROWS, F32_COLUMNS = 6, 64  # A float32 tile has this many.
F32_LANES = 16  # numbers of a sum that are kept apart until its end
KEY_TILE = 16  # keys that are multiplied with queries at a time

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
# CPU features of the compilation target: this machine, unless NUMBA_CPU_FEATURES, NUMBA_CPU_NAME=generic or
# NUMBA_ENABLE_AVX override it.
_TARGET = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
_FEATURES = {feature[1:]: feature[0] == "+" for feature in _TARGET.split(",") if feature}
LANES = 16 if _FEATURES.get("avx512f") else 8  # float32 lanes of a register
HAS_BF16 = bool(_FEATURES.get("avx512f") and _FEATURES.get("avx512bf16"))
HAS_AMX = bool(_FEATURES.get("amx-bf16"))


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """How a CPU multiplies 8-bit integers."""

    name: str
    rows: int  # rows per tile
    few_rows: int  # rows of the largest tile, used when there are no more rows
    panels: int  # adjacent panels per tile
    wide_rows: bool  # activations are 16-bit integers


VNNI_512 = InstructionSet("AVX-512 VNNI", rows=4, few_rows=8, panels=3, wide_rows=False)
VNNI_256 = InstructionSet("AVX-VNNI", rows=6, few_rows=6, panels=1, wide_rows=False)
AVX2 = InstructionSet("AVX2", rows=6, few_rows=6, panels=1, wide_rows=True)
PLAIN = InstructionSet("portable code", rows=6, few_rows=6, panels=1, wide_rows=True)


def find_instruction_set() -> InstructionSet:
    if _FEATURES.get("avx512vnni") and _FEATURES.get("avx512vl"):
        return VNNI_512
    if _FEATURES.get("avxvnni"):
        return VNNI_256
    return AVX2 if _FEATURES.get("avx2") else PLAIN


def span_rounder(wide: bool) -> Any:
    """Build a function that quantizes SPAN float32 numbers to -127..127 (16 bits if `wide`) and returns their scale and
    the start value of their sums. A NaN makes the scale NaN."""

    @intrinsic
    def round_span(_: Any, values: Any, numbers: Any, scale: Any, start: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _: Any, args: Sequence[ir.Value]) -> Any:
            values, numbers, scale, start = args
            floats, words = ir.VectorType(F32, 16), ir.VectorType(I32, 16)
            parts = [load(b, b.add(values, I64(64 * part)), floats, 4) for part in range(SPAN // 16)]
            sizes = [b.and_(b.bitcast(part, words), ir.Constant(words, [0x7FFFFFFF] * 16)) for part in parts]
            highest = reduce(b, "smax", _fold(sizes, lambda x, y: b.select(b.icmp_signed(">", x, y), x, y)))
            largest = b.bitcast(highest, F32)  # positive floats compare like integers
            none = b.icmp_signed("==", highest, I32(0))
            factor = splat(b, b.select(none, F32(0), b.fdiv(F32(127), largest)), 16)
            rint = cgutils.get_or_insert_function(b.module, ir.FunctionType(floats, [floats]), "llvm.rint.v16f32")
            whole = [b.fptosi(b.call(rint, [b.fmul(part, factor)]), words) for part in parts]
            kind = ir.VectorType(I16 if wide else I8, 16)
            for index, part in enumerate(whole):
                store(b, b.trunc(part, kind), b.add(numbers, I64(16 * (1 + wide) * index)), 1)
            finite = b.icmp_signed("<", highest, I32(0x7F800000))
            store(b, b.select(finite, b.fdiv(largest, F32(127)), F32(float("nan"))), scale, 4)
            store(b, b.mul(reduce(b, "add", _fold(whole, b.add)), I32(-OFFSET)), start, 4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return round_span


def _fold(vectors: list[ir.Value], combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    total = vectors[0]
    for vector in vectors[1:]:
        total = combine(total, vector)
    return total


def reduce(b: ir.IRBuilder, name: str, vector: ir.Value) -> ir.Value:
    """Reduce all lanes of an integer vector."""
    signature = ir.FunctionType(I32, [vector.type])
    function = cgutils.get_or_insert_function(b.module, signature, f"llvm.vector.reduce.{name}.v{vector.type.count}i32")
    return b.call(function, [vector])


def int8_tile(isa: InstructionSet, rows: int) -> Any:
    """sums [rows, panels * PANEL] float32 = left [rows, SPAN * spans] times neighbouring panels of a packed weight.

    Weights are unsigned and activations signed, as the instructions require. Every SPAN activations of a row have their
    own scale and their own start value of the sum.
    """
    multiply = _multiply_add_pairs if isa.wide_rows else _multiply_add_fours

    @intrinsic
    def tile(
        _: Any,
        sums: Any,
        left: Any,
        left_stride: Any,
        scales: Any,
        starts: Any,
        spans: Any,
        weight: Any,
        panel_stride: Any,
    ) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _: Any, args: Sequence[ir.Value]) -> Any:
            multiply(b, isa, rows, _Operands(*args))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return tile


class _Operands(NamedTuple):
    """Operands of an integer tile: addresses, strides in bytes, and the number of spans."""

    sums: ir.Value
    left: ir.Value
    left_stride: ir.Value
    scales: ir.Value  # [rows, spans] float32
    starts: ir.Value  # [rows, spans] int32
    spans: ir.Value
    weight: ir.Value
    panel_stride: ir.Value

    def of_span(self, b: ir.IRBuilder, table: ir.Value, row: int, span: ir.Value, kind: ir.Type) -> ir.Value:
        """Load the entry of a span of a row from `table`, the scales or the starts."""
        index = b.add(b.mul(self.spans, I64(row)), span)
        return load(b, b.add(table, b.mul(index, I64(4))), kind, 4)


def _multiply_add_fours(b: ir.IRBuilder, isa: InstructionSet, rows: int, of: _Operands) -> None:
    """Emit a tile with dot-product instructions: four pairs per lane and instruction.

    With several rows, arithmetic takes about as long as reading weights, so the next tile's weights are prefetched."""
    lanes = 16 if isa is VNNI_512 else 8
    words, numbers = ir.VectorType(I32, lanes), ir.VectorType(I8, 4 * lanes)
    # LLVM 22 changed the type of the operands.
    operand = numbers if llvmlite.binding.llvm_version_info[0] >= 22 else words
    signature = ir.FunctionType(words, [words, operand, operand])
    instruction = cgutils.get_or_insert_function(b.module, signature, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}")
    parts = range(0, 64, 4 * lanes)  # byte offsets of registers within a group of a panel
    addresses = [
        b.add(b.add(of.weight, b.mul(of.panel_stride, I64(panel))), I64(part))
        for panel in range(isa.panels)
        for part in parts
    ]
    width = len(addresses)
    next_tile = b.mul(of.panel_stride, I64(isa.panels))
    zero = ir.Constant(words, None)
    total = [[cgutils.alloca_once_value(b, zero) for _ in addresses] for _ in range(rows)]
    for place in range(rows * width):
        store(b, b.bitcast(zero, ir.VectorType(F32, lanes)), b.add(of.sums, I64(4 * lanes * place)), 4)
    with cgutils.for_range(b, of.spans) as span:
        for row, places in enumerate(total):
            start = splat(b, of.of_span(b, of.starts, row, span.index, I32), lanes)
            for place in places:
                b.store(start, place)
        with cgutils.for_range(b, I64(SPAN // GROUP)) as loop:
            group = b.add(b.mul(span.index, I64(SPAN // GROUP)), loop.index)
            columns = [load(b, b.add(address, b.mul(group, I64(64))), operand, 1) for address in addresses]
            if rows > 1:  # A prefetch would come too late with one row.
                for address in addresses:
                    prefetch_line(b, b.add(b.add(address, b.mul(group, I64(64))), next_tile))
            for row in range(rows):
                address = b.add(b.add(of.left, b.mul(of.left_stride, I64(row))), b.mul(group, I64(GROUP)))
                four = b.bitcast(splat(b, load(b, address, I32, 1), lanes), operand)
                for column, place in zip(columns, total[row], strict=True):
                    b.store(b.call(instruction, [b.load(place), column, four]), place)
        for row, places in enumerate(total):
            scale = splat(b, of.of_span(b, of.scales, row, span.index, F32), lanes)
            for index, place in enumerate(places):
                _add_scaled(b, b.load(place), scale, b.add(of.sums, I64(4 * lanes * (row * width + index))))


def _multiply_add_pairs(b: ir.IRBuilder, isa: InstructionSet, rows: int, of: _Operands) -> None:
    """Emit a tile without byte dot products: widen to 16 bits, where sums of two products are exact. Half a panel at a
    time, since the sums of a group take two lanes and would not fit into the registers."""
    bytes_, shorts, words = ir.VectorType(I8, 16), ir.VectorType(I16, 16), ir.VectorType(I32, 8)
    zero = ir.Constant(words, None)
    for half in range(2):
        total = [[cgutils.alloca_once_value(b, zero) for _ in range(2)] for _ in range(rows)]
        sums = [b.add(of.sums, I64(row * 64 + half * 32)) for row in range(rows)]
        for place in sums:
            store(b, b.bitcast(zero, ir.VectorType(F32, 8)), place, 4)
        with cgutils.for_range(b, of.spans) as span:
            for place in (place for places in total for place in places):
                b.store(zero, place)
            with cgutils.for_range(b, I64(SPAN // GROUP)) as loop:
                group = b.add(b.mul(span.index, I64(SPAN // GROUP)), loop.index)
                start = b.add(of.weight, b.add(b.mul(group, I64(64)), I64(32 * half)))
                columns = [b.zext(load(b, b.add(start, I64(16 * part)), bytes_, 1), shorts) for part in range(2)]
                for row in range(rows):
                    address = b.add(b.add(of.left, b.mul(of.left_stride, I64(row))), b.mul(group, I64(2 * GROUP)))
                    four = b.bitcast(splat(b, load(b, address, I64, 2), 4), shorts)
                    for column, place in zip(columns, total[row], strict=True):
                        b.store(b.add(b.load(place), _pair_products(b, isa, column, four)), place)
            for row, places in enumerate(total):
                low, high = (b.load(place) for place in places)
                start = splat(b, of.of_span(b, of.starts, row, span.index, I32), 8)
                scale = splat(b, of.of_span(b, of.scales, row, span.index, F32), 8)
                _add_scaled(b, b.add(_add_neighbours(b, low, high), start), scale, sums[row])


def _add_scaled(b: ir.IRBuilder, integers: ir.Value, scale: ir.Value, place: ir.Value) -> None:
    """Add integers times a scale to the floats at `place`."""
    lanes = integers.type.count
    numbers = ir.VectorType(F32, lanes)
    store(b, b.call(multiply_add(b, lanes), [b.sitofp(integers, numbers), scale, load(b, place, numbers, 4)]), place, 4)


def tile_finisher(columns: int) -> Any:
    """Build a function for target [rows, columns] = (or +=) sums [rows, columns] times scales [columns]; the stride of
    the target is in bytes. In LLVM IR because numba counts references to every slice."""
    numbers = ir.VectorType(F32, 16)

    @intrinsic
    def finish(_: Any, target: Any, target_stride: Any, rows: Any, sums: Any, scales: Any, adding: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _: Any, args: Sequence[ir.Value]) -> Any:
            target, target_stride, rows, sums, scales, adding = args
            scale = [load(b, b.add(scales, I64(64 * part)), numbers, 4) for part in range(columns // 16)]
            with cgutils.for_range(b, rows) as loop:
                row = b.add(sums, b.mul(loop.index, I64(columns * 4)))
                to = b.add(target, b.mul(loop.index, target_stride))
                sides = [
                    (b.fmul(load(b, b.add(row, I64(64 * part)), numbers, 4), factor), b.add(to, I64(64 * part)))
                    for part, factor in enumerate(scale)
                ]
                with b.if_else(adding) as (add, replace):
                    with add:
                        for product, place in sides:
                            store(b, b.fadd(product, load(b, place, numbers, 4)), place, 4)
                    with replace:
                        for product, place in sides:
                            store(b, product, place, 4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5, types.boolean), generate

    return finish


def _pair_products(b: ir.IRBuilder, isa: InstructionSet, x: ir.Value, y: ir.Value) -> ir.Value:
    shorts, words = ir.VectorType(I16, 16), ir.VectorType(I32, 8)
    if isa is AVX2:
        signature = ir.FunctionType(words, [shorts, shorts])
        return b.call(cgutils.get_or_insert_function(b.module, signature, "llvm.x86.avx2.pmadd.wd"), [x, y])
    products = b.mul(b.sext(x, ir.VectorType(I32, 16)), b.sext(y, ir.VectorType(I32, 16)))
    return _add_neighbours(b, products, products)


def _add_neighbours(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Add neighbouring lanes (0 + 1, 2 + 3, ... 14 + 15) of two registers of 8, or of one register of 16 given
    twice."""
    even, odd = (pick(b, low, high, range(first, 16, 2)) for first in (0, 1))
    return b.add(even, odd)


def f32_tile(rows: int) -> Any:
    """Build a function for sums [rows, F32_COLUMNS] += left [rows, depth] times right [depth, F32_COLUMNS], float32;
    the right side may be bfloat16 or int8. Strides count elements."""

    @intrinsic
    def tile(
        _: Any,
        sums: Any,
        sums_stride: Any,
        left: Any,
        left_stride: Any,
        right: Any,
        right_stride: Any,
        depth: Any,
        like: Any,  # an element of the right side, for its type
    ) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _: Any, args: Sequence[ir.Value]) -> Any:
            _add_products(b, rows, like.bitwidth // 8, args[:7], None)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7, like), generate

    return tile


def f32_tile_ahead(rows: int) -> Any:
    """Build a function like `f32_tile` that prefetches what lies `ahead` bytes behind the right side."""

    @intrinsic
    def tile(
        _: Any,
        sums: Any,
        sums_stride: Any,
        left: Any,
        left_stride: Any,
        right: Any,
        right_stride: Any,
        depth: Any,
        ahead: Any,
        like: Any,
    ) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _: Any, args: Sequence[ir.Value]) -> Any:
            _add_products(b, rows, like.bitwidth // 8, args[:7], args[7])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, like), generate

    return tile


def _add_products(b: ir.IRBuilder, rows: int, size: int, args: Sequence[ir.Value], ahead: ir.Value | None) -> None:
    sums, sums_stride, left, left_stride, right, right_stride, depth = args
    vectors_at_once = 4 if _FEATURES.get("avx512f") else 1  # limited by the number of registers
    numbers, fused = ir.VectorType(F32, 16), multiply_add(b, 16)
    sums_bytes, left_bytes = (b.mul(stride, I64(4)) for stride in (sums_stride, left_stride))
    right_bytes = b.mul(right_stride, I64(size))
    for first in range(0, F32_COLUMNS // 16, vectors_at_once):
        vectors = range(first, first + vectors_at_once)
        places = [
            [b.add(b.add(sums, b.mul(sums_bytes, I64(row))), I64(64 * vector)) for vector in vectors]
            for row in range(rows)
        ]
        total = [[cgutils.alloca_once_value(b, load(b, place, numbers, 4)) for place in row] for row in places]
        with cgutils.for_range(b, depth) as loop:
            start = b.add(right, b.mul(right_bytes, loop.index))
            offsets = [16 * size * vector for vector in vectors]
            columns = [load_numbers(b, b.add(start, I64(offset)), size) for offset in offsets]
            if ahead is not None:
                for offset in offsets:
                    if offset % 64 == 0:
                        prefetch_line(b, b.add(b.add(start, ahead), I64(offset)))
            for row in range(rows):
                address = b.add(b.add(left, b.mul(left_bytes, I64(row))), b.mul(loop.index, I64(4)))
                number = splat(b, load(b, address, F32, 4), 16)
                for column, one in zip(columns, total[row], strict=True):
                    b.store(b.call(fused, [number, column, b.load(one)]), one)
        for row_total, row_places in zip(total, places, strict=True):
            for one, place in zip(row_total, row_places, strict=True):
                store(b, b.load(one), place, 4)


def keys_tile(rows: int) -> Any:
    """Build a function for scores [rows, KEY_TILE] = queries [rows, depth] float32 times KEY_TILE keys, rows of the
    type of `like` (float32, bfloat16 or int8), each of which is loaded and widened once. Prefetches what lies `ahead`
    bytes behind them. Strides count elements, `depth` is a multiple of KEY_TILE.

    Keys are transposed in registers, and a score is summed in the order of the depth, so that it has the bits that
    `f32_tile` computes."""
    numbers = ir.VectorType(F32, KEY_TILE)

    @intrinsic
    def tile(
        _: Any,
        scores: Any,
        scores_stride: Any,
        queries: Any,
        query_stride: Any,
        keys: Any,
        key_stride: Any,
        depth: Any,
        ahead: Any,
        like: Any,
    ) -> Any:
        size = like.bitwidth // 8
        at_once = KEY_TILE * (4 // size)  # The numbers of a key that fill a register.

        def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
            scores, scores_stride, queries, query_stride, keys, key_stride, depth, ahead, _like = args
            fused, nothing = multiply_add(b, KEY_TILE), ir.Constant(numbers, None)
            starts = [b.add(queries, b.mul(query_stride, I64(4 * row))) for row in range(rows)]
            stride = b.mul(key_stride, I64(size))
            totals = [cgutils.alloca_once_value(b, nothing) for _ in range(rows)]
            for total in totals:
                b.store(nothing, total)

            def add(place: ir.Value, columns: list[ir.Value]) -> None:
                """Add the products with the numbers of all keys from `place` on."""
                for index, column in enumerate(columns):
                    at = b.mul(b.add(place, I64(index)), I64(4))
                    for start, total in zip(starts, totals, strict=True):
                        number = splat(b, load(b, b.add(start, at), F32, 4), KEY_TILE)
                        b.store(b.call(fused, [number, column, b.load(total)]), total)

            def addresses(place: ir.Value) -> list[ir.Value]:
                first = b.add(keys, b.mul(place, I64(size)))
                return [b.add(first, b.mul(stride, I64(key))) for key in range(KEY_TILE)]

            with cgutils.for_range(b, b.udiv(depth, I64(at_once))) as loop:
                place = b.mul(loop.index, I64(at_once))
                own = addresses(place)
                words = [load(b, address, numbers, 1) for address in own]
                for address in own:
                    prefetch_line(b, b.add(address, ahead))
                add(place, [number for word in transposed(b, words) for number in _numbers_of_word(b, word, size)])
            if at_once > KEY_TILE:
                whole = b.mul(b.udiv(depth, I64(at_once)), I64(at_once))
                with cgutils.for_range(b, b.udiv(b.urem(depth, I64(at_once)), I64(KEY_TILE))) as loop:
                    place = b.add(whole, b.mul(loop.index, I64(KEY_TILE)))
                    add(place, transposed(b, [load_numbers(b, address, size) for address in addresses(place)]))
            for row, total in enumerate(totals):
                store(b, b.load(total), b.add(scores, b.mul(scores_stride, I64(4 * row))), 4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, like), generate

    return tile


def _numbers_of_word(b: ir.IRBuilder, word: ir.Value, size: int) -> list[ir.Value]:
    """The numbers of `size` bytes that are in each word of 32 bits, as float32."""
    if size == 4:
        return [word]
    words, numbers = ir.VectorType(I32, KEY_TILE), ir.VectorType(F32, KEY_TILE)
    both = b.bitcast(word, words)
    if size == 2:
        low = b.shl(both, ir.Constant(words, [16] * KEY_TILE))
        high = b.and_(both, ir.Constant(words, [0xFFFF0000] * KEY_TILE))
        return [b.bitcast(half, numbers) for half in (low, high)]
    shifts = [b.shl(both, ir.Constant(words, [24 - 8 * byte] * KEY_TILE)) for byte in range(4)]
    return [b.sitofp(b.ashr(shifted, ir.Constant(words, [24] * KEY_TILE)), numbers) for shifted in shifts]


@intrinsic
def add_to_lanes(_: Any, totals: Any, factor: Any, numbers: Any) -> Any:
    """totals [F32_LANES] = totals * factor + numbers [F32_COLUMNS], added up in lanes."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        totals, factor, numbers = args
        kind = ir.VectorType(F32, F32_LANES)
        parts = [load(b, b.add(numbers, I64(4 * place)), kind, 4) for place in range(0, F32_COLUMNS, F32_LANES)]
        while len(parts) > 1:
            parts = [b.fadd(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        before = b.fmul(load(b, totals, kind, 4), splat(b, factor, F32_LANES))
        store(b, b.fadd(before, parts[0]), totals, 4)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp), generate


@intrinsic
def sum_of_lanes(_: Any, address: Any) -> Any:
    """The sum of F32_LANES float32 numbers, always in the same order."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        total = load(b, args[0], ir.VectorType(F32, F32_LANES), 4)
        while total.type.count > 1:
            half = total.type.count // 2
            total = b.fadd(pick(b, total, total, range(half)), pick(b, total, total, range(half, 2 * half)))
        return b.extract_element(total, I32(0))

    return types.float32(types.intp), generate


@intrinsic
def get_float(_: Any, address: Any) -> Any:
    """Load a float32 from any address."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return load(b, args[0], F32, 1)

    return types.float32(types.intp), generate


@intrinsic
def put_float(_: Any, address: Any, number: Any) -> Any:
    """Store a float32 at any address."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        store(b, args[1], args[0], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


def prefetcher(writing: bool) -> Any:
    """Build a function that prefetches a cache line for reading or writing."""

    @intrinsic
    def prefetch(_: Any, address: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
            prefetch_line(b, args[0], writing=writing)
            return context.get_dummy_value()

        return types.void(types.intp), generate

    return prefetch


def prefetch_line(b: ir.IRBuilder, address: ir.Value, *, writing: bool = False, near: bool = False) -> None:
    """Prefetch into L1 if `near` or for writing, and else into L2, which holds a whole tile."""
    pointer = I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
    b.call(function, [b.inttoptr(address, pointer), I32(int(writing)), I32(3 if writing or near else 2), I32(1)])


prefetch, prefetch_to_write = prefetcher(writing=False), prefetcher(writing=True)


@intrinsic
def widen_row(_: Any, target: Any, source: Any, count: Any, like: Any) -> Any:
    """Copy `count` numbers (a multiple of 16) to float32."""
    size = like.bitwidth // 8

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        target, source, count, _like = args
        with cgutils.for_range(b, b.lshr(count, I64(4))) as loop:
            row = load_numbers(b, b.add(source, b.mul(loop.index, I64(16 * size))), size)
            store(b, row, b.add(target, b.mul(loop.index, I64(64))), 4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, like), generate


@intrinsic
def transpose_16(_: Any, target: Any, target_stride: Any, source: Any, source_stride: Any, like: Any) -> Any:
    """Transpose source [16, 16] of the type of `like` (float32, bfloat16 or int8) into target, float32. Strides count
    elements."""
    size = like.bitwidth // 8

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        target, target_stride, source, source_stride, _like = args
        from_bytes, to_bytes = b.mul(source_stride, I64(size)), b.mul(target_stride, I64(4))
        rows = [load_numbers(b, b.add(source, b.mul(from_bytes, I64(row))), size) for row in range(16)]
        for row, numbers in enumerate(transposed(b, rows)):
            store(b, numbers, b.add(target, b.mul(to_bytes, I64(row))), 4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, like), generate


def transposed(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose 16 vectors of 16 numbers of 32 bits."""
    rows = list(rows)
    for half in (8, 4, 2, 1):  # swap squares of this size across the diagonal
        for row in (row for row in range(16) if not row & half):
            x, y = rows[row], rows[row + half]
            rows[row] = pick(b, x, y, [lane if not lane & half else 16 + lane - half for lane in range(16)])
            rows[row + half] = pick(b, x, y, [lane + half if not lane & half else 16 + lane for lane in range(16)])
    return rows


def load_numbers(b: ir.IRBuilder, address: ir.Value, size: int, lanes: int = 16) -> ir.Value:
    """Load float32, bfloat16 or int8 numbers as float32."""
    numbers, words = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
    if size == 4:
        return load(b, address, numbers, 4)
    if size == 1:
        return b.sitofp(b.sext(load(b, address, ir.VectorType(I8, lanes), 1), words), numbers)
    halves = b.zext(load(b, address, ir.VectorType(I16, lanes), 2), words)
    return b.bitcast(b.shl(halves, ir.Constant(words, [16] * lanes)), numbers)


def multiply_add(b: ir.IRBuilder, lanes: int) -> ir.Function:
    """Return a fused multiply-add where the CPU has one, else a product and a sum: software FMA is 100 instructions."""
    numbers = ir.VectorType(F32, lanes)
    signature = ir.FunctionType(numbers, [numbers] * 3)
    return cgutils.get_or_insert_function(b.module, signature, f"llvm.fmuladd.v{lanes}f32")


def load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def splat(b: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    kind = ir.VectorType(value.type, lanes)
    single = b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return pick(b, single, single, [0] * lanes)


def pick(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))
