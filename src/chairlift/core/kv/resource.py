"""The interface of what requests hold while they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from chairlift.core.plan import BlockCopy
from chairlift.core.request import Request


class Resource(ABC):
    """Memory with its own accounting: the blocks of the KV cache, or the state slots of recurrent layers.

    A request is admitted if every resource has what it needs. What is reserved stays reserved until the step is
    planned, even if another resource is short.
    """

    @property
    @abstractmethod
    def num_free(self) -> int:
        """How much no request holds."""

    @abstractmethod
    def num_own(self, requests: Sequence[Request]) -> int:
        """How much only `requests` hold."""

    @abstractmethod
    def need(self, request: Request) -> int:
        """How much a request, or all beams of a search, still needs for its known tokens."""

    @abstractmethod
    def to_come(self, request: Request) -> int:
        """How much a running request will still take: for its known tokens, and for the output of each of its slots."""

    @abstractmethod
    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        """Reserve what the next `count` tokens of `request` need; return the copies to make before they are written, or
        None if it is short."""

    @abstractmethod
    def commit(self, request: Request) -> None:
        """Keep what later requests can share, now that the result of a step has been applied."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Release everything that `request` holds."""
