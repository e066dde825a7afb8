"""The product of a single row with 4-bit weights, without tensor cores.

Like `kernels/triton/vector.py`: a program reads its first tiles of weights and scales straight into registers before it
waits for the previous kernel, and shares nothing with other threads until it adds up its sums.

A thread reads 16 bytes of a row of the weight, 32 numbers of one chunk. A word `w` of two 16-bit words is multiplied in
pairs of float16, without a conversion:

    w & 0x000f000f    n * 2^-24 as float16: its exponent is zero, and n is in the low bits of the mantissa
    w & 0x00f000f0    n * 2^-20; the activations of these columns are divided by 16 before
    w >> 8            the same for the other two numbers

float16 has to hold the activations and short sums of them. So each thread multiplies its 32 by the power of two that
brings the largest to between 2^12 and 2^13, and divides the sums by it. A sum in float16 has up to 8 products, of one
group of columns; then it is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chairlift.kernels.triton.int4.kernel import PANEL, high_half, low_half

COLUMNS = tl.constexpr(16)  # An int64 of the weight holds this many.
LARGE = tl.constexpr(2.0**24)  # sums are divided by it


def _registers(name: str, first: int, count: int) -> list[str]:
    """Take `count` int64 operands of PTX apart into 32-bit registers."""
    return [f"mov.b64 {{{name}{2 * i}, {name}{2 * i + 1}}}, ${first + i};" for i in range(count)]


def _text(lines: list[str]) -> tl.constexpr:
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


def _peak_text(pair: str, exponent: str, least: str) -> tl.constexpr:
    """The exponent of the largest magnitude, found as the larger of the maximum and the negated minimum."""
    lines = [".reg .b32 a<16>, b<8>, t;", *_registers("a", 2, 8)]
    lines += [f"min.{pair} b{i}, a{i}, a{i + 8}; max.{pair} a{i}, a{i}, a{i + 8};" for i in range(8)]
    for step in (4, 2, 1):
        lines += [f"min.{pair} b{i}, b{i}, b{i + step}; max.{pair} a{i}, a{i}, a{i + step};" for i in range(step)]
    lines += [f"neg.{pair} b0, b0;", f"max.{pair} a0, a0, b0;"]
    lines += ["shr.u32 t, a0, 16;", "and.b32 a0, a0, 0xffff;", "max.u32 a0, a0, t;"]
    return _text([*lines, f"and.b32 a0, a0, {exponent};", f"max.u32 $0, a0, {least};", "mov.b32 $1, $0;"])


def _sums_text(groups: int) -> tl.constexpr:
    """Sums of the activations of each group; those of the second and fourth run were divided by 16."""
    lines = [".reg .b32 a<16>, sixteen;", "mov.b32 sixteen, 0x4c004c00;", *_registers("a", groups, 8)]
    for j in range(4):
        at = 4 * j
        if j % 2 and groups == 2:
            lines += [f"fma.rn.f16x2 a{at - 4}, a{at + i}, sixteen, a{at - 4};" for i in range(4)]
        else:
            lines += [f"add.rn.f16x2 a{at}, a{at}, a{at + i};" for i in range(1, 4)]
            lines += [f"mul.rn.f16x2 a{at}, a{at}, sixteen;"] if j % 2 else []
    return _text([*lines, *(f"mov.b32 ${i}, a{16 // groups * i};" for i in range(groups))])


def _products_text(groups: int) -> tl.constexpr:
    """Operands: sums of the groups, words of the weight, four runs of activations, and what the sums begin with."""
    lines = [".reg .b32 n, w<4>, x<16>, s<4>;", ".reg .b16 low, high;", *_registers("w", groups, 2)]
    lines += [*_registers("x", groups + 2, 8), *(f"mov.b32 s{i}, ${groups + 10 + i};" for i in range(groups))]
    for i in range(4):
        for j in range(4):
            lines += [f"shr.u32 w{i}, w{i}, 8;"] if j == 2 else []
            lines += [f"and.b32 n, w{i}, {'0x00f000f0' if j % 2 else '0x000f000f'};"]
            lines += [f"fma.rn.f16x2 s{j * groups // 4}, n, x{4 * j + i}, s{j * groups // 4};"]
    for i in range(groups):
        lines += [f"mov.b32 {{low, high}}, s{i};", "add.rn.f16 low, low, high;", f"cvt.f32.f16 ${i}, low;"]
    return _text(lines)


PEAK_OF_HALVES = _peak_text("f16x2", "0x7c00", "0")
PEAK_OF_BFLOATS = _peak_text("bf16x2", "0x7f80", "0x0680")  # The peak is 2^-114 at least, so that the factor is finite.
SUMS_OF_TWO, SUMS_OF_FOUR = _sums_text(2), _sums_text(4)
PRODUCTS_OF_TWO, PRODUCTS_OF_FOUR = _products_text(2), _products_text(4)
SCALE_BFLOATS = _text(
    [
        ".reg .b32 a<2>, low, high, none;",
        "mov.b32 none, 0x80008000;",
        *_registers("a", 1, 1),
        *(
            f"fma.rn.bf16x2 a{i}, a{i}, $2, none; shl.b32 low, a{i}, 16; and.b32 high, a{i}, 0xffff0000;"
            f"cvt.rn.f16x2.f32 a{i}, high, low;"
            for i in range(2)
        ),
        "mov.b64 $0, {a0, a1};",
    ]
)
SCALE_HALVES = _text(
    [
        ".reg .b32 a<2>;",
        *_registers("a", 1, 1),
        *(f"mul.rn.f16x2 a{i}, a{i}, $2; mul.rn.f16x2 a{i}, a{i}, $3;" for i in range(2)),
        "mov.b64 $0, {a0, a1};",
    ]
)


@triton.jit
def _scaled_halves(x0, x1, x2, x3):
    """The activations of a thread in float16 times a power of two, divided by 16 in two of the runs; and the inverse of
    that power.

    It is applied as two factors, because float16 cannot represent all powers of two that are needed."""
    peak = tl.inline_asm_elementwise(
        PEAK_OF_HALVES, "=r,=r,l,l,l,l,l,l,l,l", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=2
    )
    first = tl.minimum(0xA800 - peak, 0x7800) * 0x10001
    second = (tl.maximum(0x3000 - peak, 0) + 0x3C00) * 0x10001
    less = second - 0x10001000
    x0 = tl.inline_asm_elementwise(SCALE_HALVES, "=l,l,r,r", [x0, first, second], dtype=tl.int64, is_pure=True, pack=1)
    x1 = tl.inline_asm_elementwise(SCALE_HALVES, "=l,l,r,r", [x1, first, less], dtype=tl.int64, is_pure=True, pack=1)
    x2 = tl.inline_asm_elementwise(SCALE_HALVES, "=l,l,r,r", [x2, first, second], dtype=tl.int64, is_pure=True, pack=1)
    x3 = tl.inline_asm_elementwise(SCALE_HALVES, "=l,l,r,r", [x3, first, less], dtype=tl.int64, is_pure=True, pack=1)
    return x0, x1, x2, x3, ((peak + 0x19000) << 13).to(tl.float32, bitcast=True)


@triton.jit
def _scaled_bfloats(x0, x1, x2, x3):
    """`_scaled_halves` of activations in bfloat16."""
    peak = tl.inline_asm_elementwise(
        PEAK_OF_BFLOATS, "=r,=r,l,l,l,l,l,l,l,l", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=2
    )
    factor = (0x8500 - peak) * 0x10001
    less = factor - 0x02000200
    x0 = tl.inline_asm_elementwise(SCALE_BFLOATS, "=l,l,r", [x0, factor], dtype=tl.int64, is_pure=True, pack=1)
    x1 = tl.inline_asm_elementwise(SCALE_BFLOATS, "=l,l,r", [x1, less], dtype=tl.int64, is_pure=True, pack=1)
    x2 = tl.inline_asm_elementwise(SCALE_BFLOATS, "=l,l,r", [x2, factor], dtype=tl.int64, is_pure=True, pack=1)
    x3 = tl.inline_asm_elementwise(SCALE_BFLOATS, "=l,l,r", [x3, less], dtype=tl.int64, is_pure=True, pack=1)
    return x0, x1, x2, x3, ((peak - 0x600) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _sums_of_pairs(x0, x1, x2, x3, GROUPS: tl.constexpr):
    """Sums of a thread's scaled activations, a pair of float16 for each group: two in a tensor."""
    if GROUPS == 2:
        a = tl.inline_asm_elementwise(
            SUMS_OF_TWO, "=r,=r,l,l,l,l,l,l,l,l", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=2
        )
        b = a
    else:
        a, b = tl.inline_asm_elementwise(
            SUMS_OF_FOUR, "=r,=r,=r,=r,l,l,l,l,l,l,l,l", [x0, x1, x2, x3], dtype=(tl.int32, tl.int32), is_pure=True,
            pack=2,
        )  # fmt: skip
    return a, b


@triton.jit
def _minus_eight(sums):
    """What sums of products with numbers from -8 to 7, stored as 0 to 15, begin with."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.b32 t, 0x80088008; mul.rn.f16x2 $0, $1, t; }",
        "=r,r",
        [sums],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _sum_of_pair(sums):
    """The sum of both float16 of an int32, as float32."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .f32 a;
        mov.b32 {low, high}, $1;
        cvt.f32.f16 a, low;
        cvt.f32.f16 $0, high;
        add.f32 $0, $0, a;
        }""",
        "=f,r",
        [sums],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _products(words, x0, x1, x2, x3, a, b, GROUPS: tl.constexpr):
    """Products of each group of a thread's columns, added to `a` and `b`: two groups in a tensor."""
    if GROUPS == 2:
        a = tl.inline_asm_elementwise(
            PRODUCTS_OF_TWO, "=f,=f,l,l,l,l,l,l,l,l,l,l,r,r", [words, x0, x1, x2, x3, a], dtype=tl.float32,
            is_pure=True, pack=2,
        )  # fmt: skip
        b = a
    else:
        a, b = tl.inline_asm_elementwise(
            PRODUCTS_OF_FOUR, "=f,=f,=f,=f,l,l,l,l,l,l,l,l,l,l,r,r,r,r", [words, x0, x1, x2, x3, a, b],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    return a, b


@triton.jit
def _as_float(bits, HALF: tl.constexpr):
    """An int16 that is a float16 or bfloat16, as float32."""
    return (bits.to(tl.float16, bitcast=True) if HALF else bits.to(tl.bfloat16, bitcast=True)).to(tl.float32)


@triton.jit
def _run_product(words, x, j: tl.constexpr, HALF: tl.constexpr):
    """Products of the numbers j of each word, and the sums of the activations."""
    product = tl.zeros(words.shape, tl.float32)
    total = tl.zeros(x.shape, tl.float32)
    for i in tl.static_range(4):
        column = _as_float((x >> (16 * i)).to(tl.int16), HALF)
        product += ((words >> (16 * i + 4 * j)) & 15).to(tl.float32) * column[None, :]
        total += column
    return product, total[None, :]


@triton.jit
def _neighbours(a, b):
    """The sum of two neighbours in `a`, beside the same of `b`."""
    a = tl.sum(tl.reshape(a, [a.shape[0], a.shape[1] // 2, 2]), 2)
    b = tl.sum(tl.reshape(b, [b.shape[0], b.shape[1] // 2, 2]), 2)
    return tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1] * 2])


@triton.jit
def _plain_products(words, x0, x1, x2, x3, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Products and sums of activations of each group, for Triton's interpreter and GPUs that are not NVIDIA's."""
    p0, s0 = _run_product(words, x0, 0, HALF)
    p1, s1 = _run_product(words, x1, 1, HALF)
    p2, s2 = _run_product(words, x2, 2, HALF)
    p3, s3 = _run_product(words, x3, 3, HALF)
    if GROUPS == 2:
        a, s = _neighbours(p0 + p1, p2 + p3), _neighbours(s0 + s1, s2 + s3)
        b, t = a, s
    else:
        a, s = _neighbours(p0, p1), _neighbours(s0, s1)
        b, t = _neighbours(p2, p3), _neighbours(s2, s3)
    return a, b, s, t


@triton.jit
def _scales_of_groups(scales, HALF: tl.constexpr, ASM: tl.constexpr):
    """Scales in 16 bits as float32."""
    if ASM and not HALF:  # two at once
        found = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [scales], dtype=tl.float32, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        found = _as_float(scales, HALF)
    return found


@triton.jit
def _scaled_groups(products, scales, sums, OFFSETS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """The products of two groups, scaled, plus the offsets times the sums of activations."""
    if OFFSETS:
        total = products * low_half(scales, HALF) + sums * high_half(scales, HALF)
    else:
        total = products * _scales_of_groups(scales, HALF, ASM)
    return total


@triton.jit
def _plus_tile(
    acc, tile, x0, x1, x2, x3,
    GROUPS: tl.constexpr, OFFSETS: tl.constexpr, HALF: tl.constexpr, X_HALF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the product of a tile of the weight, divided by LARGE."""
    words, scales, more_scales = tile
    if ASM:
        if X_HALF:
            x0, x1, x2, x3, inverse = _scaled_halves(x0, x1, x2, x3)
        else:
            x0, x1, x2, x3, inverse = _scaled_bfloats(x0, x1, x2, x3)
        s, t = _sums_of_pairs(x0, x1, x2, x3, GROUPS)
        a, b = tl.zeros_like(s), tl.zeros_like(s)
        if OFFSETS:
            s, t = _sum_of_pair(s) / LARGE, _sum_of_pair(t) / LARGE
        else:
            a, b = _minus_eight(s), _minus_eight(t)
        s, t = s[None, :], t[None, :]
        a, b = _products(
            words, x0[None, :], x1[None, :], x2[None, :], x3[None, :], a[None, :], b[None, :], GROUPS
        )  # fmt: skip
        inverse = tl.split(tl.reshape(inverse, [inverse.shape[0] // 2, 2]))[0][None, :]
    else:
        a, b, s, t = _plain_products(words, x0, x1, x2, x3, GROUPS, X_HALF)
        inverse = 1.0 / LARGE
        if not OFFSETS:
            a, b = a - 8.0 * s, b - 8.0 * t
    total = _scaled_groups(a, scales, s, OFFSETS, HALF, ASM)
    if GROUPS == 4:
        total += _scaled_groups(b, more_scales, t, OFFSETS, HALF, ASM)
    low, high = tl.split(tl.reshape(total, [total.shape[0], total.shape[1] // 2, 2]))
    return acc + (low + high) * inverse


@triton.jit
def _load_tile(
    words_at, scales_at, q, row_size, line, H: tl.constexpr, GROUPS: tl.constexpr, OFFSETS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Load elements `q` of some rows of the weight, which are read once in a step, and the scales of their groups.

    Of the two elements that a thread reads of a row, one gets the scale of the first group of a chunk and one that of
    the second; with four groups, more scales are those of the third and fourth."""
    chunk = q // (H // 4)
    words_at += (q + chunk * ((PANEL - 1) * H // 4))[None, :]
    LINES: tl.constexpr = GROUPS if OFFSETS else GROUPS // 2
    if OFFSETS:
        scales_at += ((chunk * LINES + q % 2) * line)[None, :]
        more_at = scales_at + 2 * line
    else:
        scales_at += (chunk * LINES * (2 * line) + q % 2)[None, :]
        more_at = scales_at + 2 * line
    if EVEN:
        words = tl.load(words_at, eviction_policy="evict_first")
        scales = tl.load(scales_at)
    else:
        inside = (q < row_size)[None, :]
        words = tl.load(words_at, mask=inside, other=0, eviction_policy="evict_first")
        scales = tl.load(scales_at, mask=inside, other=0)
    more_scales = scales
    if GROUPS == 4:
        more_scales = tl.load(more_at) if EVEN else tl.load(more_at, mask=(q < row_size)[None, :], other=0)
    return words, scales, more_scales


@triton.jit
def _load_run(x_ptr, q, row_size, j: tl.constexpr, H: tl.constexpr, EVEN: tl.constexpr):
    """Load the activations of the numbers j of each word."""
    at = x_ptr + q + q // (H // 4) * (3 * H // 4) + j * (H // 4)
    return tl.load(at) if EVEN else tl.load(at, mask=q < row_size, other=0)


@triton.jit
def int4_vector_kernel(
    x_ptr,  # [K]; only its element type is used
    x_words_ptr,  # int64 [K / 4], the same
    words_ptr,  # int64 [N / PANEL, CHUNKS, PANEL, H / 4]; GATED: 2 N rows, the gate's first
    scales_ptr,  # [groups, N] int32, or [pairs of groups, N, 2] int16 without OFFSETS; 2 N with GATED
    bias_ptr,  # [N]
    out_ptr,  # [N]; with RESIDUAL the product is added to it
    next_norm_ptr,  # [N]: the weight of the norm that follows, with SCALED
    scaled_ptr,  # [N]: the result times `next_norm_ptr`, with SCALED
    squares_ptr,  # [SQUARES] float32: partial sums of squares of x
    squares_out_ptr,  # [programs] float32
    N,
    K,
    eps,
    BN: tl.constexpr,  # divides PANEL
    BK: tl.constexpr,
    STEPS: tl.constexpr,  # tiles of a program
    AHEAD: tl.constexpr,  # tiles in flight, 1 or 2
    H: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of a chunk
    OFFSETS: tl.constexpr,
    HALF: tl.constexpr,  # scales are float16, not bfloat16
    EVEN: tl.constexpr,  # the tiles end with the row
    SQUARES: tl.constexpr,  # 0: x is not normalised
    SQUARES_PADDED: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    row = block * BN
    ROWS: tl.constexpr = 2 * BN if GATED else BN
    STEP: tl.constexpr = BK // COLUMNS
    i = tl.arange(0, ROWS)
    q = tl.arange(0, STEP)
    row_size = K // COLUMNS
    line = 2 * N if GATED else N
    words_at = words_ptr + (row // PANEL).to(tl.int64) * (row_size * PANEL) + (row % PANEL) * (H // 4)
    words_at += ((i % BN) * (H // 4) + (i // BN).to(tl.int64) * (N.to(tl.int64) * row_size))[:, None]
    scales_at = scales_ptr + ((row + i % BN + i // BN * N) * (1 if OFFSETS else 2))[:, None]
    tile = _load_tile(words_at, scales_at, q, row_size, line, H, GROUPS, OFFSETS, EVEN)
    then = tile
    if AHEAD == 2:
        then = _load_tile(words_at, scales_at, q + STEP, row_size, line, H, GROUPS, OFFSETS, EVEN)
    n = row + tl.arange(0, BN)
    if SCALED:
        next_norm = tl.load(next_norm_ptr + n).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + n).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SQUARES > 0:
        part = tl.arange(0, SQUARES_PADDED)
        squares = tl.load(squares_ptr + part, mask=part < SQUARES, other=0.0)
    if RESIDUAL:
        before = tl.load(out_ptr + n).to(tl.float32)
    X_HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    acc = tl.zeros([ROWS, STEP // 2], tl.float32)
    for step in tl.static_range(STEPS):
        x0 = _load_run(x_words_ptr, q, row_size, 0, H, EVEN)
        x1 = _load_run(x_words_ptr, q, row_size, 1, H, EVEN)
        x2 = _load_run(x_words_ptr, q, row_size, 2, H, EVEN)
        x3 = _load_run(x_words_ptr, q, row_size, 3, H, EVEN)
        acc = _plus_tile(acc, tile, x0, x1, x2, x3, GROUPS, OFFSETS, HALF, X_HALF, ASM)
        q += STEP
        tile = then
        if step + AHEAD < STEPS:
            ahead = q + (AHEAD - 1) * STEP
            then = _load_tile(words_at, scales_at, ahead, row_size, line, H, GROUPS, OFFSETS, EVEN)
        if AHEAD == 1:
            tile = then
    total = tl.sum(acc, 1) * LARGE
    if SQUARES > 0:
        total *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if GATED:
        total, up = tl.split(tl.trans(tl.reshape(total, [2, BN])))
    if BIAS:
        total += bias
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    if RESIDUAL:
        total += before
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + n, rounded)
    if SCALED:
        tl.store(scaled_ptr + n, (rounded.to(tl.float32) * next_norm).to(scaled_ptr.dtype.element_ty))
    if RESIDUAL:  # the next norm needs sums of squares
        kept = rounded.to(tl.float32)
        tl.store(squares_out_ptr + block, tl.sum(kept * kept, 0))
