"""The accounted cache of encoded images: what is encoded when, and what is kept.

An image is a run of placeholder tokens whose embeddings come from an encoder. Encoding is work of a step like the
tokens of prompts are: the cache gives it to the steps in slices, which are paid for in tokens of the prefill budget. A
chunk of a prompt ends in front of an image that is not encoded yet. What is encoded stays in the cache, under a key
made of the request's salt and the image's digest, until others need the room: the least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from chairlift.core.images import EncodePlan, ImageWork, PromptImage, image_key
from chairlift.core.request import Request

LEAST_PRICE, MOST_PRICE = 0.05, 200.0  # tokens for one unit of an encoder's work
FEWEST_TOKENS = 16  # A step with fewer prompt tokens shows little of what one of them takes.
_LEARNING = 0.3  # the weight of the last step in what was learned


@dataclass(slots=True)
class _Entry:
    """What is known of an image beside its data, which would take several times the memory of its embeddings."""

    rows: int
    work: int
    owner: str  # the request that it was encoded for
    done: int = 0  # units of its work

    @property
    def left(self) -> int:
        return self.work - self.done


@dataclass(frozen=True, slots=True)
class EncoderUsage:
    """Counts of an encoder cache since the start, and what it holds."""

    encoded: int
    hits: int
    evicted: int
    rows: int
    capacity: int


class EncoderCache:
    """Decides what is encoded when, and what is kept; a runner has the embeddings. `capacity` is in rows."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.open: dict[str, Request] = {}  # requests with images, from their submission to their end
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._rows = self._encoded = self._hits = self._evicted = 0
        self._partial: bytes | None = None  # what has been begun and not ended
        self._owed = list[bytes]()  # what the runner is still told to drop
        self._seconds_per_unit = self._seconds_per_token = 0.0  # 0 until they are measured

    @property
    def usage(self) -> EncoderUsage:
        return EncoderUsage(self._encoded, self._hits, self._evicted, self._rows, self.capacity)

    @property
    def price(self) -> float:
        """Tokens of a prompt that take as long as one unit of work."""
        if not (self._seconds_per_unit and self._seconds_per_token):
            return 1.0
        return min(max(self._seconds_per_unit / self._seconds_per_token, LEAST_PRICE), MOST_PRICE)

    @property
    def may_plan(self) -> bool:
        """Whether there may be something to encode, or to give up."""
        return bool(self.open) or self.is_left_over

    @property
    def is_left_over(self) -> bool:
        """Whether the runner holds work that no request wants any more; its intermediate results take memory."""
        return not self.open and (self._partial is not None or bool(self._owed))

    def is_ready(self, request: Request, image: PromptImage) -> bool:
        entry = self._entries.get(image_key(request.salt, image))
        return entry is not None and entry.left <= 0

    def limit(self, request: Request, start: int, count: int) -> int:
        """How many of `count` tokens from `start` on can be computed with what is encoded.

        The tokens of an image that must be computed whole are never divided; a step may exceed its budget for them.
        """
        end = start + count
        for image in request.images:
            if image.end <= start:
                continue
            if image.start >= end or (first := image.first_from(start)) >= end:
                break
            if not self.is_ready(request, image):
                return first - start
            if image.whole and end < image.end:
                return (image.end if image.start <= start else image.start) - start
        return end - start

    def plan(self, wanted: Sequence[tuple[Request, PromptImage]], room: int) -> tuple[EncodePlan, int]:
        """Plan up to `room` tokens' worth of work on the images that are `wanted`, the most urgent first.

        Returns the plan and its price in tokens. An image that is begun is ended before another begins, and what is
        wanted earlier is never given up for what is wanted later.
        """
        keyed = [(image_key(request.salt, image), request, image) for request, image in wanted]
        drops, self._owed = self._owed, []
        if self._partial is not None and all(key != self._partial for key, _, _ in keyed):
            self._drop(self._partial, drops)
        keyed.sort(key=lambda each: each[0] != self._partial)
        kept, works, price, spent = set[bytes](), list[ImageWork](), self.price, 0
        for key, request, image in keyed:
            entry = self._entries.get(key)
            if entry is None and room > spent and self._make_room(image.rows, kept, drops):
                entry = self._entries[key] = _Entry(image.rows, image.work, request.id)
                self._rows += image.rows
            if entry is None:
                continue
            self._entries.move_to_end(key)
            first_time = key not in kept
            kept.add(key)
            if first_time and entry.left > 0 and room > spent:
                units = min(entry.left, max(1, int((room - spent) / price)))
                works.append(self._advance(key, entry, image, units))
                spent += max(1, round(units * price))
        return EncodePlan(tuple(works), tuple(drops)), spent

    def _advance(self, key: bytes, entry: _Entry, image: PromptImage, units: int) -> ImageWork:
        entry.done += units
        ended = entry.left <= 0
        self._encoded += ended
        self._partial = None if ended else key
        return ImageWork(key, image, 1.0 if ended else entry.done / entry.work, units)

    def _make_room(self, rows: int, kept: set[bytes], drops: list[bytes]) -> bool:
        """Give up what is not in `kept` until `rows` more fit; return False (and change nothing) if they cannot."""
        victims, free = [], self.capacity - self._rows
        for key, entry in self._entries.items():
            if free >= rows:
                break
            if key not in kept:
                victims.append(key)
                free += entry.rows
        if free < rows:
            return False
        for key in victims:
            self._drop(key, drops)
        return True

    def _drop(self, key: bytes, drops: list[bytes]) -> None:
        entry = self._entries.pop(key)
        self._rows -= entry.rows
        self._evicted += entry.left <= 0
        self._partial = None if self._partial == key else self._partial
        drops.append(key)

    def used(self, request: Request, start: int, end: int) -> None:
        """Count what a chunk of a request reads of images that were encoded for another one."""
        for image in request.images:
            if start < image.end <= end:
                entry = self._entries.get(image_key(request.salt, image))
                self._hits += entry is not None and entry.owner != request.id

    def abandon(self, works: Iterable[ImageWork], drops: Iterable[bytes] = ()) -> None:
        """Have this work done again, and these dropped: the step that they were planned for did not come to an end."""
        self._owed += drops
        for work in works:
            entry = self._entries.get(work.key)
            if entry is not None:
                self._drop(work.key, self._owed)
                self._encoded -= entry.left <= 0
                self._evicted -= entry.left <= 0

    def users(self, keys: Collection[bytes]) -> list[Request]:
        """The open requests with one of these images."""
        requests = list(self.open.values())
        return [each for each in requests if any(image_key(each.salt, image) in keys for image in each.images)]

    def observe(self, units: int, seconds: float, prompt_tokens: int, forward_seconds: float) -> None:
        """Learn from a step how long a unit of work and a token of a prompt take."""
        if units and seconds > 0:
            self._seconds_per_unit = _average(self._seconds_per_unit, seconds / units)
        if prompt_tokens >= FEWEST_TOKENS and forward_seconds > 0:
            self._seconds_per_token = _average(self._seconds_per_token, forward_seconds / prompt_tokens)

    def check(self) -> None:
        """Raise if the accounts are wrong."""
        assert self._rows == sum(entry.rows for entry in self._entries.values())
        assert self._rows <= self.capacity
        begun = [key for key, entry in self._entries.items() if entry.done and entry.left > 0]
        assert begun == ([] if self._partial is None else [self._partial])


def _average(before: float, last: float) -> float:
    return last if not before else (1 - _LEARNING) * before + _LEARNING * last
