"""The prefix index: maps tokens after a prefix to the cached block that holds them.

The digest of a full block is chained: SHA-256(digest of the block before it, its tokens), starting from the request's
salt. Equal digests therefore mean equal salts and equal tokens back to the first one. A hit is still compared token by
token, so that a hash collision cannot mix up two conversations. A block with tokens of images has the images' digests
behind its tokens, in all of this.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Protocol

from chairlift.core.images import PromptImage
from chairlift.core.request import Request

REMEMBERED_EVICTIONS = 65_536

Digest = Callable[[bytes, tuple[int, ...]], bytes]
"""(digest of the prefix before a block, its content) -> digest of the block."""


def sha256(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


class Miss(StrEnum):
    """Why a lookup found no further blocks."""

    DISABLED = "prefix caching is off"
    WHOLE_PROMPT = "the request needs results of every prompt token"
    TOO_SHORT = "the rest of the prompt does not fill a block"
    NEVER_SEEN = "these tokens were not computed before (or under another salt)"
    EVICTED = "the block was computed before but has been evicted since"
    NO_STATE = "the tokens are cached, but no state of the recurrent layers is kept at a later block boundary"
    NO_WINDOW = "the tokens are cached, but not what layers with a window need of them at a later block boundary"


class PrefixMatch(NamedTuple):
    blocks: tuple[int, ...]
    miss: Miss | None  # None: all blocks that can be shared were found
    in_progress: bool = False  # a running request is computing the next block
    # Further cached blocks, which are not shared: no state, or too little for layers with a window, is kept after them.
    num_without_state: int = 0


class TokenHolder(Protocol):
    """The part of a request that the index reads."""

    salt: str
    block_digests: list[bytes]  # Digests of its first full blocks, extended on demand.

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def images(self) -> Sequence[PromptImage]: ...
    @property
    def num_known(self) -> int: ...


class IndexedBlock(NamedTuple):
    """A block that was indexed."""

    digest: bytes
    parent: bytes | None  # the digest of the block before it; None: it is a first one
    tokens: Sequence[int]


class IndexObserver(ABC):
    """Is told of each change of an index. Blocks with a salt or with images are left out: their tokens alone do not say
    who can share them."""

    @abstractmethod
    def stored(self, block: IndexedBlock) -> None:
        """A block was indexed."""

    @abstractmethod
    def removed(self, digest: bytes) -> None:
        """A block was evicted; it may be one that was left out."""


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
        self._claims: dict[bytes, str] = {}  # digest -> the running request that is computing that block
        self._claimants: set[str] = set()  # requests that have claimed blocks
        self.observer: IndexObserver | None = None

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, request: TokenHolder) -> PrefixMatch:
        """Find the longest cached prefix of `request`. Changes only its digests.

        The last known token is never taken from the cache, because its logits are needed.
        """
        size, chain = self.block_size, request.block_digests
        shareable = (request.num_known - 1) // size
        blocks: list[int] = []
        parent = _root(request.salt)
        for position in range(shareable):
            block_tokens = block_content(request, position * size, (position + 1) * size)
            if position == len(chain):  # computed on demand: the queue may be long
                chain.append(self._digest(parent, block_tokens))
            digest = chain[position]
            block = self._lookup(digest)
            if block is not None:
                entry = self._entry_of[block]
                if entry.tokens != block_tokens or entry.parent != parent:
                    block = None
            if block is None:
                return PrefixMatch(tuple(blocks), *self.why_missing(request, position))
            blocks.append(block)
            parent = digest
        return PrefixMatch(tuple(blocks), None if blocks else Miss.TOO_SHORT)

    def why_missing(self, request: TokenHolder, position: int) -> tuple[Miss, bool]:
        """Why a full block of `request` is not indexed, and whether a running request computes it."""
        digest = self.digest(request, position)
        return Miss.EVICTED if digest in self._evicted else Miss.NEVER_SEEN, digest in self._claims

    def blocks(self) -> Collection[int]:
        """The blocks that are indexed."""
        return self._entry_of.keys()

    def num_cached(self, request: TokenHolder) -> int:
        """About how many of its first blocks are cached: found by bisection and not compared token by token, for many
        requests in each step. A block is evicted before those that it follows."""
        shareable = (request.num_known - 1) // self.block_size
        digests = self.digests(request, shareable)[:shareable]
        return bisect_left(digests, True, key=lambda digest: self._lookup(digest) is None)

    def _lookup(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def insert(self, request: TokenHolder, first: int, blocks: Sequence[int]) -> list[int]:
        """Index `blocks` as the full blocks of `request` from position `first` on; return those that were not indexed
        already under the same tokens."""
        size = self.block_size
        digests = self.digests(request, first + len(blocks))
        parent = digests[first - 1] if first else _root(request.salt)
        inserted = []
        for position, block in enumerate(blocks, first):
            digest = digests[position]
            if self._lookup(digest) is None:
                self._block_of[digest] = block
                block_tokens = block_content(request, position * size, (position + 1) * size)
                self._entry_of[block] = _Entry(digest, parent, block_tokens)
                self._evicted.pop(digest, None)
                self._claims.pop(digest, None)
                inserted.append(block)
                if self.observer is not None and not request.salt and not request.images:
                    self.observer.stored(IndexedBlock(digest, parent if position else None, block_tokens))
            parent = digest
        return inserted

    def block_at(self, request: TokenHolder, position: int) -> int | None:
        """The indexed block with the tokens of the full block of `request` at `position`, after the same prefix."""
        block = self._lookup(self.digest(request, position))
        if block is None:
            return None
        entry, start = self._entry_of[block], position * self.block_size
        same = entry.tokens == block_content(request, start, start + self.block_size)
        return block if same and entry.parent == self.parent_digest(request, position) else None

    def is_expected(self, digest: bytes) -> bool:
        """Whether the block is indexed or being computed."""
        return digest in self._claims or digest in self._block_of

    def claim(self, request: Request, first: int = 0) -> None:
        """Record the blocks that `request` is about to compute, none of them before the position `first`, so that other
        requests wait for them."""
        self._claimants.add(request.id)
        num_full = request.num_known // self.block_size
        for digest in self.digests(request, num_full)[first:num_full]:
            if digest not in self._block_of:
                self._claims.setdefault(digest, request.id)

    def claim_positions(self, request: Request, first: int, end: int) -> None:
        """Record blocks that are being loaded for `request`, so that other requests wait for them."""
        self._claimants.add(request.id)
        for digest in self.digests(request, end)[first:end]:
            self._claims.setdefault(digest, request.id)

    def drop_claims(self, request: Request) -> None:
        if request.id not in self._claimants:
            return
        self._claimants.remove(request.id)
        for digest in request.block_digests:
            if self._claims.get(digest) == request.id:
                del self._claims[digest]

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            digest = self._entry_of.pop(block).digest
            del self._block_of[digest]
            self._evicted[digest] = None
            if self.observer is not None:
                self.observer.removed(digest)
            if len(self._evicted) > REMEMBERED_EVICTIONS:
                self._evicted.popitem(last=False)

    def digest_of(self, block: int) -> bytes:
        """The digest of an indexed block."""
        return self._entry_of[block].digest

    def prefix_of(self, block: int) -> tuple[bytes, tuple[int, ...]]:
        """The digest of the prefix before `block` and what is in it, as `block_content`."""
        entry = self._entry_of[block]
        return entry.parent, entry.tokens

    def digest(self, request: TokenHolder, position: int) -> bytes:
        """The digest of a full block."""
        chain = request.block_digests
        return chain[position] if position < len(chain) else self.digests(request, position + 1)[position]

    def digests(self, request: TokenHolder, count: int) -> Sequence[bytes]:
        """The digests of at least the first `count` full blocks, which are cached on the request."""
        chain = request.block_digests
        if len(chain) < count:
            size = self.block_size
            parent = chain[-1] if chain else _root(request.salt)
            for start in range(len(chain) * size, count * size, size):
                parent = self._digest(parent, block_content(request, start, start + size))
                chain.append(parent)
        return chain

    def parent_digest(self, request: TokenHolder, position: int) -> bytes:
        """The digest of the salt and all tokens before a block."""
        return self.digest(request, position - 1) if position else _root(request.salt)


@lru_cache(maxsize=4096)
def _root(salt: str) -> bytes:
    """The digest before a first block."""
    # A salt from JSON may contain lone surrogates.
    return hashlib.sha256(b"salt:" + salt.encode("utf-8", "surrogatepass")).digest()


def block_content(request: TokenHolder, start: int, end: int) -> tuple[int, ...]:
    """What the keys and values of the tokens [start, end) depend on beside those before them: the tokens, and the
    digests of the images among them."""
    content = tuple(request.tokens[start:end])
    for image in request.images:
        if image.start < end and image.end > start and image.pieces(start, end):
            content += _words(image.digest)
    return content


@lru_cache(maxsize=1024)
def _words(digest: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4))
