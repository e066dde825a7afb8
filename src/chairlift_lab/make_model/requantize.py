"""Writes a GGUF file again with its matrices rounded to another type of blocks.

Rounding is simple: scales come from the largest values, and are not searched for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import InvalidParameter
from chairlift.kernels.cpu.blocks.panels import COLUMNS, IQ4_VALUES, KINDS
from chairlift.loading.gguf.file import GGUFFile
from chairlift_lab.make_model.gguf_file import SMALLER, add_field

Floats = NDArray[np.float32]
Bytes = NDArray[Any]  # uint8; numpy's types forget it in every operation on bits

SUPER = 256  # columns of a block with nested scales
OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def requantize(source: Path, kind: str, path: Path, note: Callable[[str], None]) -> None:
    """Write `source` to `path` with all matrices as `kind`, or a smaller block where their columns do not fit."""
    import gguf

    if source.suffix != ".gguf":
        raise InvalidParameter("model", f"{source} is not a GGUF file")
    file = GGUFFile(source)
    writer = gguf.GGUFWriter(path, file.metadata["general.architecture"])
    for name, value in file.metadata.items():
        if not name.startswith(OWN_FIELDS):
            add_field(writer, name, value.tolist() if isinstance(value, np.ndarray) else value)
    for tensor in file.tensors.values():
        note(f"{kind}: {tensor.name}")
        values = file.read(tensor)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            own = kind if tensor.shape[-1] % KINDS[kind].columns == 0 else SMALLER[kind]
            writer.add_tensor(tensor.name, encode(own, values), raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parse_kinds(text: str) -> list[str]:
    """ "all", or the names of types of blocks separated by commas."""
    names = list(KINDS) if text == "all" else [name.strip().upper() for name in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise InvalidParameter("block_types", f"there is no {name!r}; choose all, or from {', '.join(KINDS)}")
    return names


# ---- rows of weights to blocks --------------------------------------------------------------------------------------


def encode(kind: str, rows: Floats) -> Bytes:
    """rows [rows, columns] -> their blocks [rows, bytes]; columns must fill whole blocks."""
    if kind in _ENCODERS:
        blocks = rows.reshape(-1, KINDS[kind].columns).astype(np.float32)
        return _ENCODERS[kind](blocks).reshape(len(rows), -1)
    import gguf

    blocks_of_gguf: Bytes = gguf.quants.quantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind])
    return blocks_of_gguf


def _half(values: Floats) -> tuple[Bytes, Floats]:
    """[blocks] as the bytes of float16 [blocks, 2], and as what these stand for."""
    halves = values.astype(np.float16)
    return halves[:, None].view(np.uint8), halves.astype(np.float32)


def _ratio(values: Floats, steps: Floats) -> Floats:
    """values / steps, and 0 where a step is 0."""
    zeros = np.zeros(np.broadcast(values, steps).shape, np.float32)
    return np.divide(values, steps, out=zeros, where=steps != 0)


def _nibbles(numbers: Bytes) -> Bytes:
    """[blocks, groups, 2 n] -> [blocks, groups * n]: the first half of a group in the low bits, the rest high."""
    half = numbers.shape[2] // 2
    packed: Bytes = numbers[:, :, :half] | numbers[:, :, half:] << 4
    return packed.reshape(len(numbers), -1)


def _nearest_iq4(values: Floats) -> Bytes:
    levels = np.array(IQ4_VALUES, np.float32)
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.uint8)


def _iq4_nl(blocks: Floats) -> Bytes:
    scale, exact = _half(np.abs(blocks).max(axis=1) / -IQ4_VALUES[0])
    numbers = _nearest_iq4(_ratio(blocks, exact[:, None]))
    return np.concatenate([scale, _nibbles(numbers[:, None])], axis=1)


def _iq4_xs(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, SUPER // COLUMNS, COLUMNS)
    ideal = np.abs(groups).max(axis=2) / -IQ4_VALUES[0]
    factor, exact = _half(ideal.max(axis=1) / 31)
    scales = np.rint(_ratio(ideal, exact[:, None])).clip(0, 31)
    numbers = _nearest_iq4(_ratio(groups, (exact[:, None] * scales)[:, :, None]))
    codes = scales.astype(np.uint16) + 32
    low = (codes & 15).astype(np.uint8)
    high = np.bitwise_or.reduce((codes >> 4) << (2 * np.arange(8, dtype=np.uint16)), axis=1).astype(np.uint16)
    return np.concatenate(
        [factor, high[:, None].view(np.uint8), low[:, ::2] | low[:, 1::2] << 4, _nibbles(numbers)], axis=1
    )


def _q6_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    ideal = np.abs(groups).max(axis=2) / 31
    factor, exact = _half(ideal.max(axis=1) / 127)
    scales = np.rint(_ratio(ideal, exact[:, None])).clip(0, 127)
    steps = (exact[:, None] * scales)[:, :, None]
    numbers = (np.rint(_ratio(groups, steps)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, COLUMNS)
    low = numbers & 15
    lows = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    highs = np.bitwise_or.reduce((numbers >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    count = len(blocks)
    parts = [lows.reshape(count, -1), highs.reshape(count, -1), scales.astype(np.int8).view(np.uint8), factor]
    return np.concatenate(parts, axis=1)


def _k(bits: int) -> Callable[[Floats], Bytes]:
    """Q4_K and Q5_K: a scale and a minimum of six bits for each group."""

    def encode_blocks(blocks: Floats) -> Bytes:
        groups = blocks.reshape(-1, SUPER // COLUMNS, COLUMNS)
        lowest = np.maximum(0, -groups.min(axis=2))
        ideal = (groups.max(axis=2) + lowest) / (2**bits - 1)
        factor, exact = _half(ideal.max(axis=1) / 63)
        low_factor, low_exact = _half(lowest.max(axis=1) / 63)
        scales = np.rint(_ratio(ideal, exact[:, None])).clip(0, 63)
        lows = np.rint(_ratio(lowest, low_exact[:, None])).clip(0, 63)
        steps, shifts = (exact[:, None] * scales)[:, :, None], (low_exact[:, None] * lows)[:, :, None]
        numbers = np.rint(_ratio(groups + shifts, steps)).clip(0, 2**bits - 1).astype(np.uint8)
        parts = [factor, low_factor, _six_bits(scales.astype(np.uint8), lows.astype(np.uint8))]
        if bits == 5:
            parts.append(np.bitwise_or.reduce((numbers >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1))
        parts.append(_nibbles((numbers & 15).reshape(-1, 4, 2 * COLUMNS)))
        return np.concatenate(parts, axis=1)

    return encode_blocks


def _six_bits(scales: Bytes, lows: Bytes) -> Bytes:
    """Eight scales and eight minima in twelve bytes."""
    first, second = scales[:, :4] | scales[:, 4:] >> 4 << 6, lows[:, :4] | lows[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (lows[:, 4:] & 15) << 4], axis=1)


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q6_K": _q6_k,
    "Q4_K": _k(4),
    "Q5_K": _k(5),
}
