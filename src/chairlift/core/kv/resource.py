"""What a request holds besides KV blocks, such as the states of recurrent layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from chairlift.core.kv.prefix_index import PrefixIndex, PrefixMatch
from chairlift.core.request import Request


class Resource(ABC):
    """Memory of its own accounting that follows the block tables of a `KVCache`.

    The cache asks it what a prefix hit may start with, and passes on everything that happens to a request. All of a
    request's resources are reserved or none is missed: what is reserved stays reserved until the step is planned.
    """

    @abstractmethod
    def join(self, index: PrefixIndex) -> None:
        """Called once, by the cache that it belongs to, with the index of its blocks."""

    @abstractmethod
    def spare(self, request: Request, staying: Sequence[Request], leaving: Sequence[Request]) -> int:
        """How much would be free with `request` admitted beside the `staying` requests and without the `leaving` ones,
        after all that the former may still need. Negative: it does not fit."""

    @abstractmethod
    def shorten(self, request: Request, match: PrefixMatch) -> PrefixMatch:
        """The part of a prefix hit that the request can start with."""

    @abstractmethod
    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Called when the table of `request` has started with the blocks of `match`."""

    @abstractmethod
    def fork_point(self, parent: Request, num_tokens: int) -> int:
        """The most tokens, up to `num_tokens`, after which another request can continue from `parent`."""

    @abstractmethod
    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Called when the table of `child` has started with `num_tokens` tokens of `parent`, a fork point."""

    @abstractmethod
    def reserve(self, request: Request, count: int) -> bool:
        """Reserve what the next `count` tokens of `request` need; False if it is short."""

    @abstractmethod
    def commit(self, request: Request) -> None:
        """Called when the result of a step has been applied and its full blocks are indexed."""

    @abstractmethod
    def trim(self, request: Request, num_tokens: int) -> None:
        """Continue after the first `num_tokens` tokens; the others were drafts."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Release everything that `request` holds."""

    @abstractmethod
    def evicted(self, blocks: Sequence[int]) -> None:
        """Called when cached blocks are evicted."""
