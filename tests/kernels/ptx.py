"""Executes the PTX of `tl.inline_asm_elementwise` in numpy, where there is no GPU: Triton's interpreter cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Floats = NDArray[np.float64]


def _half(bits: NDArray[np.uint16]) -> Floats:
    return bits.view(np.float16).astype(np.float64)


def _to_half(values: Floats) -> NDArray[np.uint16]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _bfloat(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _to_bfloat(values: Floats) -> NDArray[np.uint16]:
    exact = values.astype(np.float32)
    assert np.array_equal(exact, values), "only for results that float32 holds"
    return torch.from_numpy(exact).bfloat16().view(torch.int16).numpy().view(np.uint16)


TYPES = {"f16": (_half, _to_half), "bf16": (_bfloat, _to_bfloat)}
OPERATIONS: dict[str, Callable[..., Floats]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "min": np.minimum,
    "max": np.maximum,
    "neg": lambda a: -a,
}
BITS: dict[str, Callable[..., Words]] = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "max.u32": np.maximum,
}


def _halves(words: Words) -> list[NDArray[np.uint16]]:
    return [(words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)]


def _joined(low: NDArray[np.uint16], high: NDArray[np.uint16]) -> Words:
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def _on_floats(name: str, values: Sequence[Words]) -> Words:
    """Arithmetic of a 16-bit type, or of pairs of it."""
    operation, kind = name.split(".")[0], name.split(".")[-1]
    from_bits, to_bits = TYPES[kind.removesuffix("x2")]
    parts = [_halves(each) for each in values]
    found = [to_bits(OPERATIONS[operation](*(from_bits(part[i]) for part in parts))) for i in range(2)]
    return _joined(*found) if kind.endswith("x2") else found[0].astype(np.uint32)


def _compute(name: str, values: Sequence[Words]) -> Words:
    if name in BITS:
        return BITS[name](*values)
    if name == "cvt.rn.f16x2.f32":  # the first operand is the upper half
        high, low = (_to_half(each.view(np.float32).astype(np.float64)) for each in values)
        return _joined(low, high)
    if name == "cvt.f32.f16":
        return _half(_halves(values[0])[0]).astype(np.float32).view(np.uint32)
    if name == "add.f32":
        return (values[0].view(np.float32) + values[1].view(np.float32)).view(np.uint32)
    return _on_floats(name, values)


def execute(text: str, num_results: int, operands: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """The results of a text of PTX, of operands $num_results and on, as many at once as the arrays have."""
    registers: dict[str, NDArray[Any]] = {f"${num_results + i}": each for i, each in enumerate(operands)}
    shape = operands[0].shape

    def value(name: str) -> NDArray[Any]:
        if name in registers:
            return registers[name]
        return np.full(shape, int(name, 0), np.uint32)

    for statement in re.split(r";\s*", text.strip().removeprefix("{").removesuffix("}").strip()):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if rest.startswith("{"):
            (low, high), source = re.findall(r"\w+", rest.partition("}")[0]), value(rest.partition("}, ")[2])
            half = 32 if name == "mov.b64" else 16
            registers[low] = (source & (2**half - 1)).astype(np.uint32)
            registers[high] = (source >> np.uint64(half) if half == 32 else source >> np.uint32(16)).astype(np.uint32)
        elif "{" in rest:
            target, low, high = re.findall(r"[$\w]+", rest)
            registers[target] = registers[low].astype(np.uint64) | registers[high].astype(np.uint64) << np.uint64(32)
        else:
            target, *sources = rest.split(", ")
            values = [value(each) for each in sources]
            registers[target] = values[0] if name == "mov.b32" else _compute(name, values)
    return [registers[f"${i}"] for i in range(num_results)]
