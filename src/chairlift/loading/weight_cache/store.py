"""Where packed weights come from and go to: nowhere, a file that is read, or one that is written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from chairlift.byte_sizes import format_bytes
from chairlift.loading.weight_cache.cache_file import (
    CacheWriter,
    Identity,
    PackedArray,
    PackedWeightArrays,
    read_cache,
)

log = logging.getLogger("chairlift")


class WeightStore:
    """Without a cache: weights stay in the memory that they were packed into."""

    mapped_bytes = 0  # of weights that are mapped from a file, whose pages count as free memory

    def find(self, name: str) -> PackedWeightArrays | None:
        """The arrays of a weight, if the cache has them."""
        return None

    def keep(self, name: str, format: str, arrays: Sequence[PackedArray]) -> Sequence[PackedArray]:
        """Called once a weight is packed; returns the arrays to use from now on."""
        return arrays


class StoredWeights(WeightStore):
    """The weights of a file. Raises UnusableCache if it is damaged or has another identity."""

    def __init__(self, path: Path, identity: Identity, num_threads: int) -> None:
        self._weights: Mapping[str, PackedWeightArrays] = read_cache(path, identity, num_threads)
        self.mapped_bytes = sum(weight.num_bytes for weight in self._weights.values())

    def find(self, name: str) -> PackedWeightArrays | None:
        return self._weights.get(name)


class WeightRecorder(WeightStore):
    """Writes weights to a file as they are packed; if that fails, the rest stays in memory."""

    def __init__(self, path: Path, identity: Identity, num_threads: int) -> None:
        """Raises OSError if the file cannot be created."""
        self._path, self._num_threads = path, num_threads
        self._writer: CacheWriter | None = CacheWriter(path, identity)

    def keep(self, name: str, format: str, arrays: Sequence[PackedArray]) -> Sequence[PackedArray]:
        if self._writer is None:
            return arrays
        try:
            kept = self._writer.add(name, PackedWeightArrays(format, arrays), self._num_threads)
        except OSError as error:
            self._give_up(error)
            return arrays
        self.mapped_bytes += kept.num_bytes
        return kept.arrays

    def finish(self) -> None:
        """Complete the file: all weights are in it."""
        if self._writer is None:
            return
        try:
            self._writer.finish()
        except OSError as error:
            self._give_up(error)
            return
        self._writer = None
        log.info(f"cache      {format_bytes(self.mapped_bytes)} of packed weights written to {self._path}")

    def close(self) -> None:
        """Remove a file that was not finished."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def _give_up(self, error: OSError) -> None:
        log.warning(f"packed weights are not cached: {self._path}: {error.strerror or error}")
        self.close()
