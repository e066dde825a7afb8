"""Conversion of 8-bit floats (e4m3) to 16 bits in registers.

The bits of an e4m3 number, moved to the place of a bfloat16's, are the number times 2^-120, so that a few integer
operations and one product convert two numbers at once; the chip's own conversion takes longer than reading the numbers
from memory. A NaN becomes 480: weights have one in their scale instead, and the keys of prompts are converted
otherwise. FAST is for Hopper and later.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(x, kind: tl.constexpr, FAST: tl.constexpr):
    """Convert e4m3 to another float type."""
    if FAST and kind == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c;
            mov.b32 c, 0x7b807b80;
            prmt.b32 a, $1, 0, 0x1404;
            shr.u32 b, a, 4;
            and.b32 b, b, 0x07f007f0;
            lop3.b32 b, a, 0x80008000, b, 0xea;
            mul.bf16x2 $0, b, c;
            }
            """,
            "=r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif FAST and kind == tl.float16:
        x = x.to(tl.float16)
    else:  # GPUs before Hopper convert e4m3 to bfloat16 only via another type.
        x = x.to(tl.float32).to(kind)
    return x


@triton.jit
def halves(words, kind: tl.constexpr, FAST: tl.constexpr):
    """Convert int16 words of two e4m3 numbers; returns the low and the high ones."""
    if FAST and kind == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, e;
            mov.b32 e, 0x7b807b80;
            shl.b32 a, $2, 4;
            shl.b32 b, $2, 8;
            shr.u32 c, $2, 4;
            and.b32 a, a, 0x07f007f0;
            and.b32 c, c, 0x07f007f0;
            lop3.b32 a, b, 0x80008000, a, 0xea;
            lop3.b32 c, $2, 0x80008000, c, 0xea;
            mul.bf16x2 $0, a, e;
            mul.bf16x2 $1, c, e;
            }
            """,
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif FAST and kind == tl.float16:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a;
            .reg .b16 b, c;
            prmt.b32 a, $2, 0, 0x3120;
            mov.b32 {b, c}, a;
            cvt.rn.f16x2.e4m3x2 $0, b;
            cvt.rn.f16x2.e4m3x2 $1, c;
            }
            """,
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(kind)
        high = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(kind)
    return low, high
