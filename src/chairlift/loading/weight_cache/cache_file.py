"""The file of a weight cache: arrays on page boundaries, an index, and a trailer that finds and checks the index.

    array | padding | array | ... | index (JSON) | magic, offset and length of the index, its SHA-256

The arrays are mapped, so processes share their pages, which are huge ones where the file system supports it: reading
weights then misses the TLB less often. A file is written under another name and renamed when it is complete. It may
still be damaged, old or of another user: whatever does not fit raises `UnusableCache`, and the caller packs the weights
again.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.machine.files import create_private, open_private

MAGIC = b"chairlift-pack-1"
TRAILER = struct.Struct("<16sQQ32s")
PAGE = mmap.ALLOCATIONGRANULARITY
HUGE_PAGE = 1 << 21
MAX_INDEX_BYTES = 1 << 26
MAX_DIMENSIONS = 6
DTYPES = ("uint8", "uint16", "float32")
CHUNK = 1 << 16  # bytes with a sum of their own, so that chunks cannot change places unnoticed
SLICE = 1 << 26  # bytes summed by one task

Identity = Mapping[str, Any]
"""What the weights were packed from and by, as JSON: a file with another identity is not used."""


class UnusableCache(Exception):
    """The file is damaged, or was made from something else."""


@dataclass(frozen=True, slots=True)
class PackedArray:
    """An array of a packed weight; the label is for the format of the weight."""

    label: str
    values: NDArray[Any]

    def __post_init__(self) -> None:
        if self.values.dtype.name not in DTYPES:
            raise ValueError(f"packed array {self.label!r} must be {' or '.join(DTYPES)}, not {self.values.dtype.name}")


def replacing(own: Sequence[PackedArray], others: Sequence[PackedArray]) -> list[NDArray[Any]]:
    """The values of other arrays of a weight; raises ValueError if they have another form than its own."""
    forms = [[(each.label, each.values.dtype, each.values.shape) for each in side] for side in (own, others)]
    if forms[0] != forms[1]:
        raise ValueError("tiles do not fit")
    return [array.values for array in others]


@dataclass(frozen=True, slots=True)
class PackedWeightArrays:
    """The arrays of one weight, and the name of its format."""

    format: str
    arrays: Sequence[PackedArray]

    @property
    def num_bytes(self) -> int:
        return sum(array.values.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class _Entry:
    label: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def read_cache(path: Path, identity: Identity, num_threads: int) -> dict[str, PackedWeightArrays]:
    """Map the weights of a file and check every byte of them."""
    try:
        with open(open_private(path), "rb") as file:
            data = np.frombuffer(_map_file(file.fileno(), 0, 0), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise UnusableCache(str(error)) from None
    index, end = _read_index(data)
    if index.get("identity") != json.loads(json.dumps(identity)):
        raise UnusableCache("the file was made from another checkpoint or by another version")
    weights, expected = dict[str, PackedWeightArrays](), list[str]()
    try:
        for name, weight in index["weights"].items():
            arrays = []
            for entry in (_read_entry(each, end) for each in weight["arrays"]):
                piece = np.asarray(data[entry.offset : entry.offset + entry.num_bytes])
                arrays.append(PackedArray(entry.label, piece.view(entry.dtype).reshape(entry.shape)))
                expected.append(entry.checksum)
            weights[str(name)] = PackedWeightArrays(str(weight["format"]), arrays)
    except (AttributeError, KeyError, TypeError) as error:
        raise UnusableCache(f"the index lacks a field ({error})") from None
    if checksums([array.values for weight in weights.values() for array in weight.arrays], num_threads) != expected:
        raise UnusableCache("the content does not match the checksums")
    return weights


def _map_file(file: int, offset: int, num_bytes: int) -> mmap.mmap:
    """Map a part of a file, zero bytes being all of it, and request huge pages before any page is read."""
    # Copy on write: pages are shared as long as they are only read, and arrays have the type of other arrays.
    mapped = mmap.mmap(file, num_bytes, access=mmap.ACCESS_COPY, offset=offset)
    with suppress(AttributeError, OSError):  # other systems, and kernels without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _read_index(data: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """The index and where it begins."""
    if len(data) < TRAILER.size:
        raise UnusableCache("the file is too short")
    magic, offset, length, digest = TRAILER.unpack(data[-TRAILER.size :].tobytes())
    if magic != MAGIC or length > MAX_INDEX_BYTES or offset + length + TRAILER.size != len(data):
        raise UnusableCache("the file has no valid end")
    text = data[offset : offset + length].tobytes()
    if hashlib.sha256(text).digest() != digest:
        raise UnusableCache("the index is damaged")
    try:
        index = json.loads(text)
    except ValueError:
        raise UnusableCache("the index is not JSON") from None
    if not isinstance(index, dict):
        raise UnusableCache("the index is not a JSON object")
    return index, offset


def _read_entry(stored: Any, end: int) -> _Entry:
    entry = _Entry(stored["label"], stored["dtype"], tuple(stored["shape"]), stored["offset"], stored["checksum"])
    whole = all(type(number) is int and number >= 0 for number in (*entry.shape, entry.offset))
    if entry.dtype not in DTYPES or not whole or not 1 <= len(entry.shape) <= MAX_DIMENSIONS:
        raise UnusableCache("an array in its index is invalid")
    if entry.offset % PAGE or entry.offset + entry.num_bytes > end:
        raise UnusableCache("an array in its index is outside of the file")
    return entry


class CacheWriter:
    """Writes a file. Raises OSError, also where the disk is full."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path, self._identity = path, identity
        self._partial = path.with_name(f"{path.name}.partial")
        self._weights: dict[str, Any] = {}
        self._end = self._reserved = 0
        self._file = create_private(self._partial)  # It replaces the file of a start that was killed.

    def add(self, name: str, weight: PackedWeightArrays, num_threads: int) -> PackedWeightArrays:
        """Write the arrays of a weight; returns them as mapped from the file."""
        sums = checksums([array.values for array in weight.arrays], num_threads)
        entries, mapped = [], []
        for array, checksum in zip(weight.arrays, sums, strict=True):
            self._end = -(-self._end // PAGE) * PAGE
            values = np.ascontiguousarray(array.values)
            entry = _Entry(array.label, values.dtype.name, values.shape, self._end, checksum)
            mapped.append(PackedArray(array.label, self._map(entry)))
            self._put(memoryview(values.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
            if not np.array_equal(mapped[-1].values, values):  # a file system whose writes bypass pages in memory
                raise OSError("what was written to the file does not appear where it is mapped")
            entries.append(asdict(entry))
        self._weights[name] = {"format": weight.format, "arrays": entries}
        return PackedWeightArrays(weight.format, mapped)

    def _map(self, entry: _Entry) -> NDArray[Any]:
        """Map the room of an array, before it is written: the pages of the file are then as large as they are mapped.
        Huge pages at both ends of the array are mapped as a whole."""
        begin = entry.offset // HUGE_PAGE * HUGE_PAGE
        end = (entry.offset + entry.num_bytes) // HUGE_PAGE * HUGE_PAGE + HUGE_PAGE
        self._reserve(end)
        data = np.frombuffer(_map_file(self._file, begin, end - begin), np.uint8)
        data[::HUGE_PAGE].max()  # read every huge page
        start = entry.offset - begin
        return data[start : start + entry.num_bytes].view(entry.dtype).reshape(entry.shape)

    def _reserve(self, end: int) -> None:
        """Make the file this long; raises OSError if the disk is full, where reading a page of a hole may be fatal."""
        if end > self._reserved:
            os.posix_fallocate(self._file, self._reserved, end - self._reserved)
            self._reserved = end

    def _put(self, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._file, data[:SLICE], self._end)
            self._end += written
            data = data[written:]

    def finish(self) -> None:
        """Write the index and give the file its name."""
        index = json.dumps({"identity": self._identity, "weights": self._weights}).encode()
        offset = self._end
        self._put(memoryview(index))
        self._put(memoryview(TRAILER.pack(MAGIC, offset, len(index), hashlib.sha256(index).digest())))
        os.ftruncate(self._file, self._end)
        os.close(self._file)
        self._partial.replace(self._path)

    def abandon(self) -> None:
        """Remove what was written; arrays that are mapped from it stay valid."""
        os.close(self._file)
        self._partial.unlink(missing_ok=True)


def checksums(arrays: Sequence[NDArray[Any]], num_threads: int) -> list[str]:
    """A sum of each array's chunks. It finds damage, not forgery; summing is as fast as reading memory."""
    flat = [array.reshape(-1).view(np.uint8) for array in arrays]
    slices = [(index, start) for index, data in enumerate(flat) for start in range(0, len(data), SLICE)]
    digests = [hashlib.sha256() for _ in flat]
    with ThreadPoolExecutor(num_threads) as pool:
        sums = pool.map(lambda piece: _chunk_sums(flat[piece[0]][piece[1] : piece[1] + SLICE]), slices)
        for (index, _), chunk_sums in zip(slices, sums, strict=True):
            digests[index].update(chunk_sums)
    return [digest.hexdigest() for digest in digests]


def _chunk_sums(data: NDArray[np.uint8]) -> bytes:
    """The sum of the words of each chunk, and the bytes that do not fill a chunk."""
    whole = len(data) // CHUNK * CHUNK
    sums = data[:whole].view(np.uint64).reshape(-1, CHUNK // 8).sum(axis=1, dtype=np.uint64)
    return bytes(sums.tobytes() + data[whole:].tobytes())
