"""Images in prompts: where they stand, what encoding them costs, and the work on them in a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache


@dataclass(frozen=True, eq=False)
class PromptImage:
    """One image of a prompt. `data` is what the encoder reads; nothing here looks into it."""

    digest: bytes  # 32 bytes that no other image has
    spans: Sequence[tuple[int, int]]  # the prompt positions [start, end) that its embeddings fill, in order
    work: int  # units of the encoder's work: those of one take about as long as a token of a prompt
    whole: bool = False  # its tokens see each other, so that one step must compute all of them
    data: object = field(default=None, repr=False)

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        return self.spans[-1][1]

    @cached_property
    def rows(self) -> int:
        """Its embeddings."""
        return sum(end - start for start, end in self.spans)

    def first_from(self, position: int) -> int:
        """The first of its positions that is not before `position`, which is before its end."""
        return next(max(start, position) for start, end in self.spans if end > position)

    def pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Its parts in the chunk [start, end) of a prompt: (first position, first of its rows, number of rows)."""
        parts, row = [], 0
        for first, last in self.spans:
            low, high = max(first, start), min(last, end)
            if low < high:
                parts.append((low, row + low - first, high - low))
            row += last - first
        return parts


@dataclass(frozen=True, slots=True)
class ImageWork:
    """A slice of the work on one image: afterwards `share` of it is done, and 1 means that it is encoded."""

    key: bytes
    image: PromptImage
    share: float
    units: int


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """What a step does for images before everything else."""

    works: tuple[ImageWork, ...] = ()
    drops: tuple[bytes, ...] = ()  # what the cache has given up, which comes first

    @property
    def units(self) -> int:
        return sum(work.units for work in self.works)

    def __bool__(self) -> bool:
        return bool(self.works or self.drops)


NO_ENCODING = EncodePlan()


def image_key(salt: str, image: PromptImage) -> bytes:
    """The key of an encoded image: requests with different salts never share one."""
    return image.digest + _salt_digest(salt)


@lru_cache(maxsize=4096)
def _salt_digest(salt: str) -> bytes:
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()[:16]
