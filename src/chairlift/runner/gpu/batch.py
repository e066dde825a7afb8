"""One step as numbers in one buffer, so that a single copy takes all of it to the device.

A buffer has sections, whose sizes depend on the shape of the batch alone. A captured graph reads the sections of its
own shape, and is replayed for every batch that fits: what is left over in a section belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

FLOATS = ("temperature", "top_p", "min_p", "uniform")


@dataclass(frozen=True)
class BatchShape:
    tokens: int  # rows of the batch
    chunks: int
    singles: int  # only the first so many chunks may be single tokens
    tiles: int  # tiles of queries of the longer chunks
    samples: int  # rows that are sampled from
    updates: int  # changed entries of block tables
    long: bool = False  # some single token has a long context, which is cut into more parts than it would be else
    deep: bool = False  # some longer chunk has one, which is read in larger tiles than it would be else

    @property
    def sections(self) -> dict[str, slice]:
        """Where in the buffer each array lies."""
        return _sections(self)

    @property
    def size(self) -> int:
        return int(next(reversed(self.sections.values())).stop)  # the end of the last one

    def host_views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: buffer[section].view(np.float32) if name in FLOATS else buffer[section]
            for name, section in self.sections.items()
        }

    def device_views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[section].view(torch.float32) if name in FLOATS else buffer[section]
            for name, section in self.sections.items()
        }


@lru_cache(maxsize=1024)  # not kept with a shape: every step makes its own, mostly equal to the last
def _sections(shape: BatchShape) -> dict[str, slice]:
    sizes = (
        dict.fromkeys(("token", "slot", "position"), shape.tokens)
        | dict.fromkeys(("chunk_slot", "chunk_row", "chunk_start", "chunk_count"), shape.chunks)
        | dict.fromkeys(("tile_chunk", "tile_offset"), shape.tiles)
        | dict.fromkeys(("sample_row", "sample_slot", "top_k", *FLOATS), shape.samples)
        | dict.fromkeys(("update_cell", "update_block"), shape.updates)
    )
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = slice(at, at + size)
        at += -(-size // 4) * 4  # 16 bytes: what the kernels' loads like
    return found


def fill_with_nobody(views: dict[str, np.ndarray], idle_cell: int) -> None:
    """A batch without any request: no row writes to the cache or is sampled."""
    for name in ("token", "slot", "chunk_slot", "chunk_row", "chunk_start", "chunk_count", "tile_offset", "sample_row"):
        views[name][:] = 0
    for name in ("position", "tile_chunk", "sample_slot"):
        views[name][:] = -1
    for name in ("temperature", "top_k", "min_p", "uniform"):
        views[name][:] = 0
    views["top_p"][:] = 1
    views["update_cell"][:] = idle_cell
    views["update_block"][:] = 0


MIXED_BUCKETS = [128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]  # tokens; longer steps run eagerly
SPARE_TILES = 16  # longer chunks that a captured mixed step may hold
FEW_SINGLES = 64  # of which one has a long context: better without a graph that has a program for each seat
UNCAPTURED = 512  # tokens of a prompt that stands for all that are too long: few, but more than layers are fused for
FEWEST_UPDATES = 8  # of block tables, for which there is room in any captured step


class Shapes:
    """Which shape carries a batch. Where graphs are captured, few shapes serve all batches that recur."""

    def __init__(
        self,
        seats: int,
        rows: int,
        tile_queries: int,
        *,
        graphs: bool,
        long_context: int | None,
        splits_more: Callable[[int], bool],
    ) -> None:
        """`rows`: the most single tokens of a step: one of each seat, and their drafts. `long_context`: the number
        of tokens beyond which a context is long; None if none can be. `splits_more`: as in BatchSpec."""
        self._seats = seats
        self._rows = rows
        self._tile_queries = tile_queries
        self._graphs = graphs
        self._long_context = long_context
        self._splits_more = splits_more
        self.decode_buckets = decode_buckets(rows)

    def largest(self, max_batch_tokens: int) -> BatchShape:
        """One that no batch exceeds in any respect."""
        tokens = max(max_batch_tokens + self._rows, MIXED_BUCKETS[-1])
        return BatchShape(
            tokens, self._rows, self._rows, tokens + SPARE_TILES, self._rows, self._most_updates(tokens, self._rows)
        )

    def _most_updates(self, tokens: int, requests: int) -> int:
        """No token begins more than one block; the rest is for tables that are sent again."""
        return tokens + 4 * requests

    def decodes(self, size: int, *, long: bool = False) -> BatchShape:
        """Of single tokens alone."""
        return self._cut(BatchShape(size, size, size, 0, size, max(size, FEWEST_UPDATES)), long)

    def _cut(self, shape: BatchShape, long: bool) -> BatchShape:
        """Told apart only where it matters: else there would be two graphs of the same step."""
        cut = long and self._long_context is not None and self._splits_more(shape.singles)
        return replace(shape, long=True) if cut else shape

    def all_decodes(self, sizes: Sequence[int]) -> list[BatchShape]:
        """Those with long contexts last, as far as they are others."""
        return [*dict.fromkeys(self.decodes(size, long=long) for long in (False, True) for size in sizes)]

    def _is_long(self, context: int) -> bool:
        return self._long_context is not None and context > self._long_context

    def beside_prompts(self, decodes: BatchShape) -> list[BatchShape]:
        """Steps that are not captured, by what their kernels are: the same single tokens beside a prompt, and a prompt
        that follows a long context."""
        singles = decodes.singles
        found = [replace(decodes, tokens=singles + UNCAPTURED, chunks=singles + 1, tiles=1)]
        if self._long_context is not None:
            found.append(BatchShape(UNCAPTURED, 1, 0, 1, 1, FEWEST_UPDATES, deep=True))
        return found

    def choose(
        self,
        *,
        tokens: int,
        chunks: int,
        singles: int,
        tiles: int,
        samples: int,
        updates: int,
        longest: int = 0,
        deepest: int = 0,
    ) -> tuple[BatchShape, bool]:
        """The shape for this batch, and whether it is one that recurs, so that a graph of it pays. `longest`: the
        longest context of a single token; `deepest`: of a longer chunk. A captured step serves all of the latter."""
        long = self._is_long(longest)
        updates = min(updates, self._most_updates(tokens, self._seats))
        exact = BatchShape(tokens, chunks, singles, tiles, samples, updates, deep=self._is_long(deepest))
        if not self._graphs:
            return self._cut(exact, long), False
        if not tiles:
            size = round_up(tokens, self.decode_buckets)
            return (self._cut(exact, long), False) if size is None else (self.decodes(size, long=long), True)
        bucket = round_up(tokens, MIXED_BUCKETS)
        if bucket is None:
            return self._cut(self._familiar(exact), long), False
        seats = min(self._seats, bucket)
        most_tiles = bucket // self._tile_queries + SPARE_TILES
        shape = BatchShape(bucket, seats, seats, most_tiles, seats, max(bucket, 2 * seats))
        fits = tiles <= shape.tiles and chunks <= seats and samples <= seats
        # A graph for many single tokens has a program for each, however few there are. Those would be waited for.
        fits &= not long or singles > FEW_SINGLES
        return self._cut(shape if fits else self._familiar(exact), long), fits

    def _familiar(self, exact: BatchShape) -> BatchShape:
        """With as many rows of each kind as some decode step: what chooses its kernel by that number has chosen it
        before. Loading another one takes as long as the step."""
        singles, samples = (
            (round_up(rows, self.decode_buckets) or rows) if rows else 0 for rows in (exact.singles, exact.samples)
        )
        singles = min(singles, exact.tokens)
        return replace(exact, singles=singles, chunks=max(exact.chunks, singles), samples=samples)


def round_up(value: int, buckets: list[int]) -> int | None:
    """The smallest bucket that holds `value`; None if none does."""
    return next((bucket for bucket in buckets if bucket >= value), None)


def decode_buckets(rows: int) -> list[int]:
    """Batch sizes with a graph of their own. The smallest ones are for long contexts, which many programs share."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, *range(256, 512, 64), *range(512, rows, 128)]
    return [size for size in sizes if size < rows] + [rows]
