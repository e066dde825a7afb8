"""A strict reader of GGUF files.

A GGUF file is a header, metadata (key, type, value), tensor descriptions, and then the tensor data:

    magic "GGUF" | version | tensor count | key count | metadata ... | descriptions ... | padding | data ...

The file may be damaged or hostile. So every count, length and offset is checked against the size of the
file before anything is allocated for it, and every violation is a `CorruptCheckpoint`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Never

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import CorruptCheckpoint, UnsupportedModel

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 15
MAX_STRINGS = 1 << 21  # All arrays together have no more; the largest vocabularies have a million tokens and merges.
MAX_TEXT_BYTES = 1 << 26  # All strings together have no more.
MAX_NESTED_ARRAYS = 1 << 12  # A file has no more; no known model has any.
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 256
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
SLAB = 1 << 16  # values dequantized at once: temporaries stay in the CPU cache

_BOOL, _STRING, _ARRAY, _FLOAT32 = 7, 8, 9, 6
_SCALARS = dict(
    zip(
        (0, 1, 2, 3, 4, 5, _FLOAT32, _BOOL, 10, 11, 12),
        ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "<u8", "<i8", "<f8"),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in torch; the file stores the reverse
    type: int  # a gguf.GGMLQuantizationType
    offset: int  # It counts from the start of the file.
    num_bytes: int


class GGUFFile:
    """The metadata and tensors of a memory-mapped GGUF file.

    Metadata values are `int`, `float`, `bool`, `str`, lists of `str` or of lists, and numpy arrays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size == 0:
                corrupt(path, "it is empty")
            self._bytes: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, mode="r"))
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: cannot be read: {error.strerror or error}") from None
        cursor = _Cursor(path, self._bytes)
        num_tensors, num_keys = _read_header(cursor)
        self.metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
            if key in self.metadata:
                corrupt(path, f"the metadata key {key!r} appears twice")
            self.metadata[key] = cursor.value(repr(key), cursor.integer(f"the type of {key!r}", 4))
        self.tensors = _read_tensors(cursor, num_tensors, self.metadata.get("general.alignment", 32))

    def read(self, tensor: GGUFTensor, part: int | None = None) -> NDArray[np.float32]:
        """Dequantize a tensor, or its `part`-th slice along the first dimension.

        Works slab by slab into one array, so that peak memory is little more than the result.
        """
        gguf = _gguf()
        kind = gguf.GGMLQuantizationType(tensor.type)
        block_size, _ = gguf.GGML_QUANT_SIZES[kind]
        shape = tensor.shape if part is None else tensor.shape[1:]
        blocks = self.blocks(tensor, part)
        values = np.empty((len(blocks), block_size), np.float32)
        step = SLAB // block_size
        with np.errstate(all="ignore"):  # damaged scales give inf or nan, which is not an error here
            for start in range(0, len(blocks), step):
                slab = blocks[start : start + step]
                values[start : start + step] = gguf.quants.dequantize(slab.reshape(1, -1), kind).reshape(
                    slab.shape[0], block_size
                )
        return values.reshape(shape)

    def blocks(self, tensor: GGUFTensor, part: int | None = None) -> NDArray[np.uint8]:
        """The bytes of a tensor, or of its `part`-th slice, as stored: [blocks, bytes of a block]."""
        gguf = _gguf()
        _, type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
        data = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        if part is not None:
            part_bytes = tensor.num_bytes // tensor.shape[0]
            data = data[part * part_bytes : (part + 1) * part_bytes]
        return data.reshape(-1, type_size)

    def kind(self, tensor: GGUFTensor) -> str:
        """The name of a tensor's type, such as Q4_K."""
        return str(_gguf().GGMLQuantizationType(tensor.type).name)


def corrupt(path: Path, problem: str) -> Never:
    raise CorruptCheckpoint(
        f"{path}: {problem}. The file is damaged, incomplete or not what it claims: fetch it again."
    )


def _gguf() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise UnsupportedModel("GGUF files need the `gguf` package: install it with `pip install gguf`") from None
    return gguf


class _Cursor:
    """Reads bytes in sequence, never past their end."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.data = data
        self.view = memoryview(data)  # type: ignore[arg-type]
        self.position = 0
        self._left = {"strings": MAX_STRINGS, "bytes of text": MAX_TEXT_BYTES, "nested arrays": MAX_NESTED_ARRAYS}

    def spend(self, kind: str, count: int) -> None:
        """Count what the metadata consists of, and refuse files with far more than any model has."""
        self._left[kind] -= count
        if self._left[kind] < 0:
            corrupt(self.path, f"its metadata has too many {kind}")

    @property
    def remaining(self) -> int:
        return len(self.view) - self.position

    def advance(self, count: int, what: str) -> int:
        """Skip `count` bytes; return their offset."""
        if count > self.remaining:
            corrupt(self.path, f"{what} needs {count} bytes at {self.position} where {self.remaining} are left")
        start = self.position
        self.position += count
        return start

    def integer(self, what: str, size: int) -> int:
        start = self.advance(size, what)
        return int.from_bytes(self.view[start : start + size], "little")

    def count(self, what: str, limit: int, smallest: int) -> int:
        """Read the number of items that follow, each of at least `smallest` bytes."""
        count = self.integer(what, 8)
        if count > limit or count * smallest > self.remaining:
            corrupt(self.path, f"{what} is {count}, more than the limit ({limit}) or than the file can hold")
        return count

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.integer(f"the length of {what}", 8)
        if limit is not None and length > limit:
            corrupt(self.path, f"{what} has {length} bytes, more than the limit ({limit})")
        start = self.advance(length, what)
        self.spend("bytes of text", length)
        try:
            return str(self.view[start : start + length], "utf-8")
        except UnicodeDecodeError:
            corrupt(self.path, f"{what} is not UTF-8 text")

    def strings(self, what: str) -> list[str]:
        """Read an array of strings; a bare loop, since vocabularies have 256,000 of them."""
        count = self.count(f"the length of {what}", MAX_STRINGS, smallest=8)
        self.spend("strings", count)
        begin, most = self.position, self._left["bytes of text"] + 8 * count
        view, position, end = self.view, begin, min(len(self.view), begin + most)
        unpack = struct.Struct("<Q").unpack_from
        result: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(view, position)[0]
                if position > end:
                    break
                result.append(str(view[start:position], "utf-8"))
        except (struct.error, UnicodeDecodeError) as error:
            corrupt(self.path, f"string {len(result)} of {what}: {error}")
        self.spend("bytes of text", min(position, len(self.view)) - begin - 8 * count)
        if len(result) != count:
            corrupt(self.path, f"string {len(result)} of {what} runs past the end of the file")
        self.position = position
        return result

    def value(self, what: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, depth=1)
        value = self.numbers(what, kind, 1)[0]
        # Return the decimal that was written, 1e-05, not 9.999999747378752e-06.
        return float(str(value)) if kind == _FLOAT32 else value.item()

    def array(self, what: str, depth: int) -> Any:
        kind = self.integer(f"the type of {what}", 4)
        if kind == _STRING:
            return self.strings(what)
        if kind != _ARRAY:
            return self.numbers(what, kind, None)
        if depth == MAX_ARRAY_DEPTH:
            corrupt(self.path, f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        count = self.count(f"the length of {what}", MAX_NESTED_ARRAYS, smallest=12)
        self.spend("nested arrays", count)
        return [self.array(what, depth + 1) for _ in range(count)]

    def numbers(self, what: str, kind: int, count: int | None) -> NDArray[Any]:
        """Read `count` numbers (None: as the file says) as a view of the file."""
        if kind not in _SCALARS:
            corrupt(self.path, f"{what} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        if count is None:
            count = self.count(f"the length of {what}", len(self.view), smallest=dtype.itemsize)
        start = self.advance(count * dtype.itemsize, what)
        numbers = self.data[start : self.position]
        return numbers != 0 if kind == _BOOL else numbers.view(dtype)


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.advance(4, "the magic number")
    if bytes(cursor.view[start : start + 4]) != b"GGUF":
        corrupt(cursor.path, "it does not begin with the magic number of GGUF")
    version = cursor.integer("the version", 4)
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{cursor.path}: GGUF version {version} is not supported, only little-endian 2 and 3; "
            "convert the model again with a current converter"
        )
    num_tensors = cursor.count("the number of tensors", MAX_TENSORS, smallest=24)
    num_keys = cursor.count("the number of metadata keys", MAX_KEYS, smallest=13)
    return num_tensors, num_keys


def _read_tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GGUFTensor]:
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        corrupt(cursor.path, f"general.alignment is {alignment!r}, not a power of two")
    described = [_read_description(cursor, index, alignment) for index in range(count)]
    start = math.ceil(cursor.position / alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    end = start
    for name, shape, kind, offset, num_bytes in sorted(described, key=lambda tensor: tensor[3]):
        if name in tensors:
            corrupt(cursor.path, f"the tensor {name!r} appears twice")
        if start + offset < end:
            corrupt(cursor.path, f"the tensor {name!r} overlaps another")
        end = start + offset + num_bytes
        if end > len(cursor.view):
            corrupt(cursor.path, f"the tensor {name!r} ends at {end}, the file at {len(cursor.view)}")
        tensors[name] = GGUFTensor(name, shape, kind, start + offset, num_bytes)
    return tensors


def _read_description(cursor: _Cursor, index: int, alignment: int) -> tuple[str, tuple[int, ...], int, int, int]:
    name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    num_dimensions = cursor.integer(f"the dimensions of {name!r}", 4)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        corrupt(cursor.path, f"the tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.integer(f"the shape of {name!r}", 8) for _ in range(num_dimensions))[::-1]
    kind = cursor.integer(f"the type of {name!r}", 4)
    offset = cursor.integer(f"the offset of {name!r}", 8)
    block_size, type_size = _block(cursor.path, name, kind)
    if 0 in shape or shape[-1] % block_size:
        corrupt(cursor.path, f"the tensor {name!r} has the shape {shape}, rows must fill blocks of {block_size}")
    if offset % alignment:
        corrupt(cursor.path, f"the tensor {name!r} is at {offset}, not at a multiple of {alignment}")
    return name, shape, kind, offset, math.prod(shape) // block_size * type_size


def _block(path: Path, name: str, kind: int) -> tuple[int, int]:
    """Values and bytes per block of this tensor type."""
    gguf = _gguf()
    try:
        quantization = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedModel(f"{path}: the tensor {name!r} has the unknown tensor type {kind}") from None
    if not _can_dequantize(kind):
        raise UnsupportedModel(
            f"{path}: the tensor {name!r} has the type {quantization.name}, which the installed gguf package "
            "cannot dequantize; upgrade it or use another quantization of the model"
        )
    block_size, type_size = gguf.GGML_QUANT_SIZES[quantization]
    return block_size, type_size


@cache
def _can_dequantize(kind: int) -> bool:
    gguf = _gguf()
    quantization = gguf.GGMLQuantizationType(kind)
    one_block = np.zeros((1, gguf.GGML_QUANT_SIZES[quantization][1]), np.uint8)
    try:
        gguf.quants.dequantize(one_block, quantization)
    except NotImplementedError:
        return False
    return True
