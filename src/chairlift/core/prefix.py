"""The prefix index: which cached block holds which tokens after which prefix.

Each full block has a digest that is chained, SHA-256(digest of the block before it, its tokens), starting from the
request's salt. Equal digests therefore mean equal prefixes, under the same salt, back to the first token. A hit is
still compared token by token, so that not even a broken hash could mix up two conversations.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from chairlift.core.request import Request

REMEMBERED_EVICTIONS = 65_536

Digest = Callable[[bytes, tuple[int, ...]], bytes]
"""Of a block: from the digest of the prefix before it, and its tokens."""


def sha256(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


class Miss(StrEnum):
    """Why a lookup found no more than it did."""

    DISABLED = "prefix caching is off"
    TOO_SHORT = "the rest of the prompt does not fill a block"
    NEVER_SEEN = "these tokens were not computed before (or under another salt)"
    EVICTED = "the block was computed before but has been evicted since"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    blocks: tuple[int, ...]
    miss: Miss | None  # None: every block that could be shared was found
    coming: bool = False  # a request on board is computing the next block right now


class _Entry(NamedTuple):
    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


class PrefixIndex:
    def __init__(self, block_size: int, digest: Digest = sha256) -> None:
        self.block_size = block_size
        self._digest = digest
        self._block_of: dict[bytes, int] = {}
        self._entry_of: dict[int, _Entry] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._claims: dict[bytes, str] = {}  # digest -> the request on board that is computing that block

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, request: Request) -> PrefixMatch:
        """The longest run of cached blocks that starts `request`'s tokens. Changes nothing but its digests.

        The last known token is never taken from the cache: it has to be computed to get its logits.
        """
        shareable = (request.num_known - 1) // self.block_size
        blocks: list[int] = []
        for position in range(shareable):  # digests are made as far as needed: the queue may be long
            digest = self.digest(request, position)
            block = self._lookup(request, position, digest)
            if block is None:
                miss = Miss.EVICTED if digest in self._evicted else Miss.NEVER_SEEN
                return PrefixMatch(tuple(blocks), miss, coming=digest in self._claims)
            blocks.append(block)
        return PrefixMatch(tuple(blocks), None if blocks else Miss.TOO_SHORT)

    def _lookup(self, request: Request, position: int, digest: bytes) -> int | None:
        block = self._block_of.get(digest)
        if block is None:
            return None
        entry = self._entry_of[block]
        same = entry.tokens == self._block_tokens(request, position)
        return block if same and entry.parent == self.parent_digest(request, position) else None

    def insert(self, request: Request, position: int, block: int) -> bool:
        """Index `block` as the `position`-th full block of `request`; False if those tokens are indexed already."""
        digest = self.digest(request, position)
        if digest in self._block_of:
            return False
        parent = self.parent_digest(request, position)
        self._block_of[digest] = block
        self._entry_of[block] = _Entry(digest, parent, self._block_tokens(request, position))
        self._evicted.pop(digest, None)
        self._claims.pop(digest, None)
        return True

    def claim(self, request: Request) -> None:
        """Announce the blocks that `request` is about to fill, so that others can wait instead of doing the same."""
        for position in range(request.num_known // self.block_size):
            digest = self.digest(request, position)
            if digest not in self._block_of:
                self._claims.setdefault(digest, request.id)

    def disclaim(self, request: Request) -> None:
        for digest in request.block_digests:
            if self._claims.get(digest) == request.id:
                del self._claims[digest]

    def remove(self, block: int) -> None:
        entry = self._entry_of.pop(block, None)
        if entry is None:
            return  # it was never indexed (`KVCache.leave_behind`)
        digest = entry.digest
        del self._block_of[digest]
        self._evicted[digest] = None
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def prefix_of(self, block: int) -> tuple[bytes, tuple[int, ...]]:
        """The digest of the prefix before `block`, and the tokens in it."""
        entry = self._entry_of[block]
        return entry.parent, entry.tokens

    def digest(self, request: Request, position: int) -> bytes:
        """The digest of a full block; computed once and kept on the request, with those before it."""
        chain = request.block_digests
        for missing in range(len(chain), position + 1):
            parent = chain[-1] if chain else self.parent_digest(request, 0)
            chain.append(self._digest(parent, self._block_tokens(request, missing)))
        return chain[position]

    def parent_digest(self, request: Request, position: int) -> bytes:
        """The digest of all that comes before a block: the salt, and the tokens of the blocks before it."""
        if position:
            return self.digest(request, position - 1)
        # A salt may come from JSON, which can spell what is not valid Unicode.
        return hashlib.sha256(b"salt:" + request.salt.encode("utf-8", "surrogatepass")).digest()

    def _block_tokens(self, request: Request, position: int) -> tuple[int, ...]:
        start = position * self.block_size
        return tuple(request.tokens[start : start + self.block_size])
