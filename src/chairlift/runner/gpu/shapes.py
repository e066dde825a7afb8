"""The shapes of steps. All inputs of a step lie in one buffer, which a single copy takes to the device.

A buffer has sections, whose sizes depend on the shape of the batch alone. A captured graph reads the sections of its
own shape and is replayed for every batch that fits; what a batch leaves unused of a section is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.paged.slots import MIN_UPDATES, Sections
from chairlift.attention.recurrent import RecurrentBatch, RecurrentStep, StateStorage
from chairlift.core.plan import NO_SLOT, StepPlan
from chairlift.kernels.graphs import round_up

CHUNK_ARRAYS, TILE_ARRAYS = ("chunk_slot", "chunk_row", "chunk_start", "chunk_count"), ("tile_chunk", "tile_offset")
FLOATS = ("temperature", "top_p", "min_p", "uniform")
MIXED_BUCKETS = [128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]  # tokens; longer steps run eagerly
SPARE_TILES = 16  # longer chunks that a captured mixed step may hold
FEW_SINGLES = 64  # Up to this number do without a graph if one has a long context: see `choose`.
FIRST_PROMPT = 256  # tokens of the prompts that are prepared for first
UNCAPTURED = 512  # tokens of a prompt that stands for all that are not captured: more than layers are fused for


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How large the steps of a runner may become, and which of them are captured."""

    requests: int
    tokens: int
    context: int  # tokens of a request
    drafts: int = 0  # tokens of all requests of a step together
    drafts_per_request: int = 0
    graphs: bool = True  # whether steps are captured
    draft_graphs: bool = False  # whether the passes of a draft network are captured, too
    step_bytes: int = 0  # memory of the largest step beside weights and cache, which graphs must leave free


@dataclass(frozen=True)
class BatchShape:
    """The sizes that decide which kernels a step launches, and how large."""

    tokens: int  # rows of the batch
    chunks: int
    singles: int  # chunks that may be single tokens, which come first
    tiles: int  # tiles of queries of the longer chunks
    samples: int  # rows that are sampled
    updates: int  # entries of block tables that change
    long: bool = False  # a single token has a long context, which is cut into more parts than otherwise
    deep: bool = False  # a longer chunk has a long context, which is read in larger tiles than otherwise
    drafts: bool = False  # there are only single tokens, and some are of one request, which read what others write

    @property
    def sections(self) -> Sections:
        """The arrays of a step in the buffer of its inputs."""
        return _sections(self)


# Prompts that follow a long context, large and small: Hopper has a kernel of its own for large steps.
DEEP_PROMPT = BatchShape(UNCAPTURED, 1, 0, 1, 1, MIN_UPDATES, deep=True)
SMALL_DEEP_PROMPT = replace(DEEP_PROMPT, tokens=UNCAPTURED // 2)


@lru_cache(maxsize=1024)  # A shape does not keep them: every step makes a new one, mostly equal to the last.
def _sections(shape: BatchShape) -> Sections:
    sizes = (
        dict.fromkeys(("token", "slot", "position"), shape.tokens)
        | dict.fromkeys(CHUNK_ARRAYS, shape.chunks)
        | dict.fromkeys(TILE_ARRAYS, shape.tiles)
        | dict.fromkeys(("sample_row", "sample_slot", "top_k", *FLOATS), shape.samples)
        | dict.fromkeys(("update_cell", "update_block"), shape.updates)
        | dict.fromkeys(("state_row", "state_to"), shape.chunks if shape.tiles else 0)
    )
    return Sections({name: (size,) for name, size in sizes.items()}, FLOATS)


def fill_padding(views: dict[str, np.ndarray], padding_cell: int) -> None:
    """Fill a batch with padding rows, which write nothing to the cache and are not sampled."""
    for name in ("token", "slot", "chunk_slot", "chunk_row", "chunk_start", "chunk_count", "tile_offset", "sample_row"):
        views[name][:] = 0
    for name in ("position", "tile_chunk", "sample_slot"):
        views[name][:] = -1
    for name in ("temperature", "top_k", "min_p", "uniform"):
        views[name][:] = 0
    views["top_p"][:] = 1
    views["update_cell"][:] = padding_cell
    views["update_block"][:] = 0
    views["state_row"][:] = 0
    views["state_to"][:] = len(views["token"])


@dataclass(eq=False)
class Shapes:
    """Chooses the shape that carries a batch; where graphs are captured, few shapes serve all batches that recur."""

    max_requests: int
    rows: int  # the most single tokens of a step, which are one of each request and their drafts
    tile_queries: int
    _: KW_ONLY
    graphs: bool
    long_context: int | None  # the number of tokens beyond which a context is long; None if none can be
    splits_more: Callable[[int], bool]  # whether long contexts need a kernel of their own

    def __post_init__(self) -> None:
        self.decode_buckets = decode_buckets(self.rows)

    def largest(self, max_batch_tokens: int) -> BatchShape:
        """A shape that no batch exceeds in any respect."""
        tokens = max(max_batch_tokens + self.rows, MIXED_BUCKETS[-1])
        return BatchShape(
            tokens, self.rows, self.rows, tokens + SPARE_TILES, self.rows, self._most_updates(tokens, self.rows)
        )

    def _most_updates(self, tokens: int, requests: int) -> int:
        """One for each token, which begins at most one block; the rest is for tables that are sent again."""
        return tokens + 4 * requests

    def decode(self, size: int, *, long: bool = False, drafts: bool = False) -> BatchShape:
        """The captured shape of `size` single tokens."""
        shape = BatchShape(size, size, size, 0, size, max(size, MIN_UPDATES), drafts=drafts)
        return self._mark_long(shape, long)

    def _mark_long(self, shape: BatchShape, long: bool) -> BatchShape:
        """Mark a shape as long only where that changes its kernels, else there would be two graphs of the same step."""
        changes = long and self.long_context is not None and self.splits_more(shape.singles)
        return replace(shape, long=True) if changes else shape

    def decodes(self, sizes: Sequence[int]) -> list[BatchShape]:
        """The captured shapes of these sizes, as far as steps can have them; those with drafts behind those without,
        and those of long contexts, where they differ, last."""
        most = round_up(self.max_requests, self.decode_buckets) or self.max_requests
        forms = [(size, False) for size in sizes if size <= most]
        if self.rows > self.max_requests:
            forms += [(size, True) for size in sizes if size > 1]
        shapes = (self.decode(size, long=long, drafts=drafts) for long in (False, True) for size, drafts in forms)
        return [*dict.fromkeys(shapes)]

    def mixed(self, bucket: int) -> BatchShape:
        """The captured shape of up to `bucket` tokens with prompts among them."""
        requests = min(self.max_requests, bucket)
        return BatchShape(
            bucket, requests, requests, bucket // self.tile_queries + SPARE_TILES, requests, max(bucket, 2 * requests)
        )

    def likely(self) -> list[BatchShape]:
        """The captured shapes, in the order in which the requests of a new server probably need them: single requests
        with short prompts first, larger batches and longer prompts later, long contexts last."""
        sizes = [size for size in self.decode_buckets if size <= 2 * self.max_requests]
        decodes = [shape for shape in self.decodes(sizes) if not shape.long]
        mixed = [self.mixed(bucket) for bucket in sorted(MIXED_BUCKETS, key=lambda bucket: abs(bucket - FIRST_PROMPT))]
        alternating = [shape for pair in zip_longest(decodes, mixed) for shape in pair if shape is not None]
        return [*dict.fromkeys([*alternating, *self.decodes(sizes)])]

    def samples_of_all(self) -> list[BatchShape]:
        """Shapes that together launch every kernel whose choice does not depend on the shape."""
        return [self.decode(1), self.mixed(MIXED_BUCKETS[0]), self.mixed(MIXED_BUCKETS[-1])]

    def _is_long(self, context: int) -> bool:
        return self.long_context is not None and context > self.long_context

    def beside_prompts(self, decodes: BatchShape) -> list[BatchShape]:
        """Shapes that stand for the kernels of steps that are not captured: the same single tokens beside a prompt, and
        a prompt that follows a long context."""
        shapes = [self._beside_prompt(decodes.singles, long=decodes.long)]
        return shapes if self.long_context is None else [*shapes, DEEP_PROMPT, SMALL_DEEP_PROMPT]

    def _beside_prompt(self, singles: int, *, long: bool) -> BatchShape:
        return BatchShape(singles + UNCAPTURED, singles + 1, singles, 1, singles, MIN_UPDATES, long=long)

    def stand_ins(self, uncaptured: BatchShape) -> list[BatchShape]:
        """Shapes that together launch every kernel of a step that is not captured, by the same rows: those of its
        single tokens, those of its sampled rows, and those of a prompt that follows a long context."""
        if uncaptured.tokens < UNCAPTURED:
            return [replace(uncaptured, updates=MIN_UPDATES)]
        shapes = [self._beside_prompt(uncaptured.singles, long=uncaptured.long)] if uncaptured.singles else []
        shapes.append(self._beside_prompt(uncaptured.samples, long=False))
        return [*dict.fromkeys([*shapes, DEEP_PROMPT] if uncaptured.deep else shapes)]

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
        drafts: bool = False,
    ) -> tuple[BatchShape, bool]:
        """The shape for this batch, and whether it recurs, so that a graph of it pays.

        `longest`: the longest context of a single token; `deepest`: that of a longer chunk, which does not matter to
        captured steps. `drafts`: whether the step has any.
        """
        long = self._is_long(longest)
        drafts = drafts and not tiles
        updates = min(updates, self._most_updates(tokens, self.max_requests))
        exact = BatchShape(tokens, chunks, singles, tiles, samples, updates, deep=self._is_long(deepest), drafts=drafts)
        if not self.graphs:
            return self._mark_long(exact, long), False
        if not tiles:
            size = round_up(tokens, self.decode_buckets)
            if size is None:
                return self._mark_long(exact, long), False
            return self.decode(size, long=long, drafts=drafts), True
        bucket = round_up(tokens, MIXED_BUCKETS)
        if bucket is None:
            return self._mark_long(self._with_decode_sizes(exact), long), False
        shape = self.mixed(bucket)
        fits = tiles <= shape.tiles and chunks <= shape.chunks and samples <= shape.samples
        # A graph has a program for each single token that it has room for. With few of them and a long context, more
        # programs per token are faster.
        fits &= not long or singles > FEW_SINGLES
        return self._mark_long(shape if fits else self._with_decode_sizes(exact), long), fits

    def _with_decode_sizes(self, exact: BatchShape) -> BatchShape:
        """Round up the single and sampled rows to the sizes of decode steps, whose kernels are loaded already.

        Loading another kernel takes as long as the step.
        """
        singles, samples = (
            (round_up(rows, self.decode_buckets) or rows) if rows else 0 for rows in (exact.singles, exact.samples)
        )
        singles = min(singles, exact.tokens)
        return replace(exact, singles=singles, chunks=max(exact.chunks, singles), samples=samples)


def decode_buckets(rows: int) -> list[int]:
    """Batch sizes with a graph of their own; the smallest ones are for long contexts, which many programs share."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, *range(256, 512, 64), *range(512, rows, 128)]
    return [size for size in sizes if size < rows] + [rows]


class RecurrentInputs:
    """Where sequences begin and which slots they read and write, on the device and in host buffers of several steps."""

    def __init__(
        self, states: StateStorage, largest: BatchShape, device: torch.device, num_buffers: int, longest_decode: int
    ) -> None:
        """`longest_decode`: the rows of a decode with as many drafts as a request may have."""
        self._states = states
        self._longest_decode = longest_decode
        sizes = (largest.chunks + 1, largest.chunks, largest.tokens)
        self._ends = [int(end) for end in np.cumsum(sizes)]
        self._device = torch.zeros(self._ends[-1], dtype=torch.int32, device=device)
        self._host = [
            torch.zeros(self._ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(num_buffers)
        ]
        self.fill_padding()

    def _parts(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(starts, read, write) of a buffer."""
        first, second, third = self._ends
        return buffer[:first], buffer[first:second], buffer[second:third]

    def fill_padding(self) -> None:
        """Describe a step of padding on the device: no sequence has rows."""
        starts, read, write = self._parts(self._device)
        starts.zero_()
        read.fill_(NO_SLOT)
        write.fill_(NO_SLOT)

    def send(self, plan: StepPlan, shape: BatchShape, first_rows: np.ndarray, buffer: int) -> None:
        """Copy a step's slots to the device, with sequences in the order of their rows.

        The host buffer must not be in use by a step in flight: it goes with the staging buffer of the same number.
        """
        starts, read, write = (part.numpy() for part in self._parts(self._host[buffer]))
        order = np.argsort(first_rows)
        used = len(order)
        starts[:used] = first_rows[order]
        starts[used:] = plan.num_tokens  # further sequences have no rows
        read[:] = NO_SLOT
        write[: shape.tokens] = NO_SLOT
        for place, index in enumerate(order.tolist() if plan.states else ()):
            states = plan.states[index]
            read[place] = states.read
            for row, slot in states.writes:
                write[first_rows[index] + row] = slot
        end = self._ends[1] + shape.tokens
        self._device[:end].copy_(self._host[buffer][:end], non_blocking=True)

    def step(self, shape: BatchShape) -> RecurrentStep:
        """The recurrent part of a step of this shape on the device."""
        starts, read, write = self._parts(self._device)
        longest = shape.tokens if shape.tiles else min(self._longest_decode, shape.tokens)
        batch = RecurrentBatch(starts[: shape.chunks + 1], read[: shape.chunks], write[: shape.tokens], longest)
        return RecurrentStep(batch, self._states)
