"""The product with 4-bit weights, fused like `products` with the operations before and after it.

A weight is stored as 16-bit words of four numbers. A chunk of a row is 4 H columns in H words: nibble j of word e is
column j * H + e. So a shift and a mask make a tile of words four tiles of the weight, each for H neighbouring columns
of the activations, and no number moves to another thread. PANEL rows of a chunk are stored one behind the other: a
program reads memory in sequence.

A number n in the low bits of a float's mantissa stands for BASE + n, without a conversion:

    few rows    out += scale * (x . (BASE + n)) + (offset - BASE * scale) * (x . 1), per group of columns
    many rows   the tile of the weight is dequantized: n * scale + offset
"""

from __future__ import annotations

import triton
import triton.language as tl

from chairlift.kernels.triton.launch import parts_of_rows, prefetch_rows

PANEL = tl.constexpr(16)


@triton.jit
def low_half(pair, HALF: tl.constexpr):
    """The float16 or bfloat16 in the low bits of an int32, as float32."""
    if HALF:
        number = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = (pair << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit
def high_half(pair, HALF: tl.constexpr):
    if HALF:
        number = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = (pair & -65536).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _based_numbers(words, like, ASM: tl.constexpr):
    """Four tiles of BASE + number, in the type of `like`."""
    if not ASM:  # Triton's interpreter, and GPUs that are not NVIDIA's
        base: tl.constexpr = 1024 if like.dtype == tl.float16 else 128
        a = ((words & 15) + base).to(like.dtype)
        b = (((words >> 4) & 15) + base).to(like.dtype)
        c = (((words >> 8) & 15) + base).to(like.dtype)
        d = (((words >> 12) & 15) + base).to(like.dtype)
    elif like.dtype == tl.float16:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
            shr.u32 t, $4, 4;
            lop3.b32 $1, t, 0x000f000f, 0x64006400, 0xea;
            shr.u32 t, $4, 8;
            lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
            shr.u32 t, $4, 12;
            lop3.b32 $3, t, 0x000f000f, 0x64006400, 0xea;
            }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            shr.u32 t, $4, 4;
            lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
            shr.u32 t, $4, 8;
            lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
            shr.u32 t, $4, 12;
            lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
            }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def _dequantized(based, scale, offset, ASM: tl.constexpr):
    """(based - BASE) * scale + offset, in the type of `based`."""
    scale = tl.broadcast_to(scale.to(based.dtype)[:, None], based.shape)
    offset = tl.broadcast_to(offset.to(based.dtype)[:, None], based.shape)
    if not ASM:
        base: tl.constexpr = 1024.0 if based.dtype == tl.float16 else 128.0
        weight = ((based.to(tl.float32) - base) * scale.to(tl.float32) + offset.to(tl.float32)).to(based.dtype)
    elif based.dtype == tl.float16:
        weight = tl.inline_asm_elementwise(
            "{ .reg .b32 t, b; mov.b32 b, 0x64006400; sub.rn.f16x2 t, $1, b; fma.rn.f16x2 $0, t, $2, $3; }",
            "=r,r,r,r",
            [based, scale, offset],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        weight = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one, base;
            mov.b32 one, 0x3f803f80;
            mov.b32 base, 0xc300c300;
            fma.rn.bf16x2 t, $1, one, base;
            fma.rn.bf16x2 $0, t, $2, $3;
            }""",
            "=r,r,r,r",
            [based, scale, offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return weight


@triton.jit
def _signed(based, ASM: tl.constexpr):
    """based - (BASE + 8): the numbers 0 to 15 as -8 to 7."""
    if not ASM:
        base: tl.constexpr = 1032.0 if based.dtype == tl.float16 else 136.0
        number = (based.to(tl.float32) - base).to(based.dtype)
    elif based.dtype == tl.float16:
        number = tl.inline_asm_elementwise(
            "{ .reg .b32 b; mov.b32 b, 0x64086408; sub.rn.f16x2 $0, $1, b; }",
            "=r,r",
            [based],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        number = tl.inline_asm_elementwise(
            "{ .reg .b32 one, b; mov.b32 one, 0x3f803f80; mov.b32 b, 0xc308c308; fma.rn.bf16x2 $0, $1, one, b; }",
            "=r,r",
            [based],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return number


@triton.jit
def _plus_based(acc, based, x, ones, scale, offset, BASE: tl.constexpr):
    """Add the product of one group of columns, scaled and shifted afterwards."""
    acc += tl.dot(based, tl.trans(x)) * scale[:, None]
    acc += ones * (offset - BASE * scale)[:, None]
    return acc


@triton.jit
def _settled(acc, ASM: tl.constexpr):
    """The sum, which the compiler has to wait for here."""
    if ASM:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def _plus_groups(
    acc, a, b, c, d, x0, x1, x2, x3, s0, s1, s2, s3, t0, t1, t2, t3,
    GROUPS: tl.constexpr, OFFSETS: tl.constexpr, DIRECT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the product of a chunk for many rows.

    A sum that stays in flight over an iteration makes ptxas wait for every single wgmma instruction (C7515). So a dot
    adds to a sum of the chunk or the group, or to `acc` itself if it is waited for (DIRECT), which takes fewer
    registers.
    """
    if DIRECT:
        acc = tl.dot(_dequantized(a, s0, t0, ASM), tl.trans(x0), acc)
        acc = tl.dot(_dequantized(b, s1, t1, ASM), tl.trans(x1), acc)
        acc = tl.dot(_dequantized(c, s2, t2, ASM), tl.trans(x2), acc)
        acc = tl.dot(_dequantized(d, s3, t3, ASM), tl.trans(x3), acc)
        acc = _settled(acc, ASM)
    elif OFFSETS or GROUPS == 4:
        part = tl.dot(_dequantized(a, s0, t0, ASM), tl.trans(x0))
        part = tl.dot(_dequantized(b, s1, t1, ASM), tl.trans(x1), part)
        part = tl.dot(_dequantized(c, s2, t2, ASM), tl.trans(x2), part)
        part = tl.dot(_dequantized(d, s3, t3, ASM), tl.trans(x3), part)
        acc += part
    else:
        part = tl.dot(_signed(a, ASM), tl.trans(x0))
        part = tl.dot(_signed(b, ASM), tl.trans(x1), part)
        acc += part * s0[:, None]
        part = tl.dot(_signed(c, ASM), tl.trans(x2))
        part = tl.dot(_signed(d, ASM), tl.trans(x3), part)
        acc += part * s2[:, None]
    return acc


@triton.jit
def plus_chunk(
    acc, words, scales_at, group, N, x0, x1, x2, x3, o0, o1, o2, o3,
    GROUPS: tl.constexpr, OFFSETS: tl.constexpr, HALF: tl.constexpr, BASE: tl.constexpr, FEW: tl.constexpr,
    DIRECT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the product of a chunk, which has two or four groups of columns."""
    a, b, c, d = _based_numbers(words, x0, ASM)
    if OFFSETS:  # an int32 is the scale and the offset of a group
        p = tl.load(scales_at + group * N)
        q = tl.load(scales_at + (group + 1) * N)
        s0, s1, t0, t1 = low_half(p, HALF), low_half(q, HALF), high_half(p, HALF), high_half(q, HALF)
        if GROUPS == 4:
            p = tl.load(scales_at + (group + 2) * N)
            q = tl.load(scales_at + (group + 3) * N)
            s2, s3, t2, t3 = low_half(p, HALF), low_half(q, HALF), high_half(p, HALF), high_half(q, HALF)
    else:  # an int32 is the scales of two groups; their numbers are 0 to 15 for -8 to 7
        p = tl.load(scales_at + group // 2 * N)
        s0, s1 = low_half(p, HALF), high_half(p, HALF)
        t0, t1 = -8.0 * s0, -8.0 * s1
        if GROUPS == 4:
            p = tl.load(scales_at + (group // 2 + 1) * N)
            s2, s3 = low_half(p, HALF), high_half(p, HALF)
            t2, t3 = -8.0 * s2, -8.0 * s3
    if GROUPS == 2:
        s2, s3, t2, t3 = s1, s1, t1, t1
        s1, t1 = s0, t0
    if FEW:
        acc = _plus_based(acc, a, x0, o0, s0, t0, BASE)
        acc = _plus_based(acc, b, x1, o1, s1, t1, BASE)
        acc = _plus_based(acc, c, x2, o2, s2, t2, BASE)
        acc = _plus_based(acc, d, x3, o3, s3, t3, BASE)
    else:
        acc = _plus_groups(
            acc, a, b, c, d, x0, x1, x2, x3, s0, s1, s2, s3, t0, t1, t2, t3, GROUPS, OFFSETS, DIRECT, ASM
        )  # fmt: skip
    return acc


@triton.jit
def _sum_of_parts(parts_ptr, tile, A: tl.constexpr, B: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr):
    """Add the parts in order, read from L2 where other multiprocessors wrote them."""
    acc = tl.zeros([A, B], tl.float32)
    for other in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + other * STEP + tile, cache_modifier=".cg")
    return acc


@triton.jit(do_not_specialize=["M"])  # one kernel for all row counts of a tile
def int4_product_kernel(
    x_ptr,  # [M, K]
    x_tiles,  # the same as a tensor descriptor, if DESCRIBED
    words_ptr,  # int16 [N / PANEL, CHUNKS, PANEL, H]; GATED: 2 N rows, the gate's first
    scales_ptr,  # int32 [groups or pairs of groups, N], or 2 N columns with GATED
    bias_ptr,  # [N]
    out_ptr,  # [M, N]; with RESIDUAL the product is added to it
    next_norm_ptr,  # [N]: the weight of the norm that follows, with SCALED
    scaled_ptr,  # [M, N]: the result times `next_norm_ptr`, with SCALED
    squares_ptr,  # [M, SQUARES] float32: partial sums of squares of the rows of the residual stream
    squares_out_ptr,  # [M, programs along the columns] float32
    partial_ptr,  # [programs, SPLITS, 1 or 2, BM * BN] float32
    arrived_ptr,  # [programs] int32, all zero between launches
    M,
    N,
    K,
    row_words,  # words of a row: CHUNKS * H
    eps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of a chunk
    OFFSETS: tl.constexpr,
    HALF: tl.constexpr,  # scales are float16, not bfloat16
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARES: tl.constexpr,  # 0: x is not normalised
    SQUARES_PADDED: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    FEW: tl.constexpr,
    DIRECT: tl.constexpr,
    JOINT: tl.constexpr,  # GATED: one tile of BN rows of the weight, half of them the gate's
    DESCRIBED: tl.constexpr,
    PREFETCH: tl.constexpr,  # chunks of the weight prefetched before the previous kernel has ended
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row_block = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    m = row_block * BM + tl.arange(0, BM)
    WIDTH: tl.constexpr = BN // 2 if JOINT else BN  # columns of the result
    n = block * WIDTH + tl.arange(0, WIDTH)
    e = tl.arange(0, H)
    chunks = row_words // H
    per_split = tl.cdiv(chunks, SPLITS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, chunks)
    rows = n % N  # rows past the end read others, and their results are dropped
    if JOINT:
        both = tl.arange(0, BN)
        rows = (block * WIDTH + both % WIDTH) % N + both // WIDTH * N
    w_at = words_ptr + (rows // PANEL).to(tl.int64) * row_words * PANEL + (rows % PANEL) * H
    up_at = w_at + N.to(tl.int64) * row_words
    columns = 2 * N if GATED else N
    s_at = scales_ptr + rows
    if OVERLAP:
        if PREFETCH > 0 and row_block == 0:
            size = tl.maximum(tl.minimum(end - begin, PREFETCH), 0) * H  # words of each row
            piece_at = words_ptr + (rows // PANEL).to(tl.int64) * row_words * PANEL + begin * (PANEL * H)
            piece_at += (rows % PANEL) * size
            prefetch_rows(piece_at, size * 2)
            if GATED and not JOINT:
                prefetch_rows(piece_at + N.to(tl.int64) * row_words, size * 2)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SQUARES > 0:
        squares = parts_of_rows(squares_ptr, m, M, SQUARES, SQUARES_PADDED)
    BASE: tl.constexpr = 1024.0 if x_ptr.dtype.element_ty == tl.float16 else 128.0
    x_at = x_ptr + m.to(tl.int64)[:, None] * K + e[None, :]
    is_row = (m < M)[:, None]
    one = tl.full([BN, H], 1.0, tl.float32).to(x_ptr.dtype.element_ty)
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        k = chunk * (4 * H)
        words = tl.load(w_at[:, None] + chunk * (PANEL * H) + e[None, :])
        if DESCRIBED:  # what is past the end is zero
            x0 = x_tiles.load([row_block * BM, k])
            x1 = x_tiles.load([row_block * BM, k + H])
            x2 = x_tiles.load([row_block * BM, k + 2 * H])
            x3 = x_tiles.load([row_block * BM, k + 3 * H])
        elif EVEN_DEPTH:
            x0 = tl.load(x_at + k, mask=is_row, other=0.0)
            x1 = tl.load(x_at + k + H, mask=is_row, other=0.0)
            x2 = tl.load(x_at + k + 2 * H, mask=is_row, other=0.0)
            x3 = tl.load(x_at + k + 3 * H, mask=is_row, other=0.0)
        else:
            x0 = tl.load(x_at + k, mask=is_row & (k + e < K)[None, :], other=0.0)
            x1 = tl.load(x_at + k + H, mask=is_row & (k + H + e < K)[None, :], other=0.0)
            x2 = tl.load(x_at + k + 2 * H, mask=is_row & (k + 2 * H + e < K)[None, :], other=0.0)
            x3 = tl.load(x_at + k + 3 * H, mask=is_row & (k + 3 * H + e < K)[None, :], other=0.0)
        o0, o1, o2, o3 = acc, acc, acc, acc
        if FEW:  # the sums of the activations of each group, in the layout of the result
            o0 = tl.dot(one, tl.trans(x0))
            o1 = tl.dot(one, tl.trans(x1))
            o2 = tl.dot(one, tl.trans(x2))
            o3 = tl.dot(one, tl.trans(x3))
        group = chunk * GROUPS
        acc = plus_chunk(
            acc, words, s_at, group, columns, x0, x1, x2, x3, o0, o1, o2, o3, GROUPS, OFFSETS, HALF, BASE, FEW,
            DIRECT, ASM,
        )  # fmt: skip
        if GATED and not JOINT:
            words = tl.load(up_at[:, None] + chunk * (PANEL * H) + e[None, :])
            up = plus_chunk(
                up, words, s_at + N, group, columns, x0, x1, x2, x3, o0, o1, o2, o3, GROUPS, OFFSETS, HALF, BASE, FEW,
                DIRECT, ASM,
            )  # fmt: skip

    if SPLITS > 1:
        TILE: tl.constexpr = BM * BN
        STEP: tl.constexpr = 2 * TILE if GATED and not JOINT else TILE
        program = row_block * tl.num_programs(1) + block
        parts = partial_ptr + program.to(tl.int64) * SPLITS * STEP
        tile = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(parts + split * STEP + tile, acc)
        if GATED and not JOINT:
            tl.store(parts + split * STEP + TILE + tile, up)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + program, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.debug_barrier()
        acc = _sum_of_parts(parts, tile, BN, BM, SPLITS, STEP)
        if GATED and not JOINT:
            up = _sum_of_parts(parts + TILE, tile, BN, BM, SPLITS, STEP)
        tl.store(arrived_ptr + program, 0)

    acc = tl.trans(acc)
    if JOINT:
        acc, up = tl.split(tl.permute(tl.reshape(acc, [BM, 2, WIDTH]), [0, 2, 1]))
    elif GATED:
        up = tl.trans(up)
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        acc *= factor
    if BIAS:
        acc += tl.load(bias_ptr + n % N).to(tl.float32)[None, :]
    if GATED:
        if SQUARES > 0:
            up *= factor
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    keep = (m < M)[:, None] & (n < N)[None, :]
    if RESIDUAL:
        acc += tl.load(out_ptr + at, mask=keep, other=0.0).to(tl.float32)
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, rounded, mask=keep)
    if SCALED:
        scaled = rounded.to(tl.float32) * tl.load(next_norm_ptr + n % N).to(tl.float32)[None, :]
        tl.store(scaled_ptr + at, scaled.to(scaled_ptr.dtype.element_ty), mask=keep)
    if RESIDUAL:  # the next norm needs sums of squares
        kept = tl.where(keep, rounded.to(tl.float32), 0.0)
        tl.store(squares_out_ptr + m * tl.num_programs(1) + block, tl.sum(kept * kept, 1), mask=m < M)


@triton.jit
def dequantize_kernel(
    words_ptr,  # int16 [N / PANEL, CHUNKS, PANEL, H]
    scales_ptr,  # int32 [groups or pairs of groups, N]
    out_ptr,  # [N, K]
    N,
    K,
    row_words,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    OFFSETS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the weight of one panel and chunk in full."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    panel = tl.program_id(1)
    n = panel * PANEL + tl.arange(0, PANEL)
    e = tl.arange(0, H)
    words = tl.load(
        words_ptr + (panel.to(tl.int64) * row_words + chunk * H) * PANEL + tl.arange(0, PANEL)[:, None] * H + e
    )
    for j in tl.static_range(4):
        group = chunk * GROUPS + j * GROUPS // 4
        if OFFSETS:
            pair = tl.load(scales_ptr + group * N + n)
            scale, offset = low_half(pair, HALF), high_half(pair, HALF)
        else:
            pair = tl.load(scales_ptr + group // 2 * N + n)
            scale = high_half(pair, HALF) if (j * GROUPS // 4) % 2 == 1 else low_half(pair, HALF)
            offset = -8.0 * scale
        weight = ((words >> (4 * j)) & 15).to(tl.float32) * scale[:, None] + offset[:, None]
        k = chunk * (4 * H) + j * H + e
        at = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, weight.to(out_ptr.dtype.element_ty), mask=(k < K)[None, :])
