"""Keys of a prompt's prefixes, at several lengths that are multiples of the block size.

    tokens   64   128   192   256   320   400   ...
    key      k0 ── k1 ── k2 ── k3 ── k4 ── k5 ── ...      each digest covers all tokens before it

Two prompts have the same key exactly if they have the same first tokens, adapter and salt. Lengths grow by a quarter:
a prompt of 100,000 tokens has 31 keys, and at most a fifth of a shared prefix is overlooked.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SHORTEST_PREFIX = 64
GROWTH = 1.25
BLOCK_SIZE = 16


class PrefixKey(NamedTuple):
    num_tokens: int
    digest: bytes


def prefix_lengths(num_tokens: int) -> Iterator[int]:
    """Lengths of the prefixes of a prompt that get a key, in rising order."""
    length = SHORTEST_PREFIX
    while length <= num_tokens:
        yield length
        length = max(length + SHORTEST_PREFIX, int(length * GROWTH) // BLOCK_SIZE * BLOCK_SIZE)


def prefix_keys(tokens: Sequence[int], *, adapter: str = "", salt: str = "") -> tuple[PrefixKey, ...]:
    """The keys of a prompt, of its token ids or of a view of its text as numbers of the same size. Requests with
    different adapters or cache salts share no KV blocks and no keys."""
    state = hashlib.blake2b(f"{len(adapter)} {adapter}{salt}".encode(), digest_size=16)
    keys: list[PrefixKey] = []
    begin = 0
    for end in prefix_lengths(len(tokens)):
        part = tokens[begin:end]
        state.update(part if isinstance(part, memoryview) else array("I", part))  # of a text: no copy
        keys.append(PrefixKey(end, state.digest()))
        begin = end
    return tuple(keys)
