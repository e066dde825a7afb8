"""The interface of an eviction, which orders what no request holds by when it is given up, and the simplest one.

The same choice orders the free cached blocks of the device, the snapshots of recurrent states and the parts in each
tier behind them; each has an instance of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from chairlift.registry import Registry, make_choice

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Use:
    """The last use of something cached: when and by whom, and what is known of the next use."""

    time: float = 0.0
    num_tokens: int = 1  # tokens of the sequence up to its end: about what it saves grows with it
    session: str = ""  # requests with the same one continue each other
    expires: float | None = None  # The client wants it kept until then, and not later.
    awaits_tools: bool = False  # the output ended with tool calls, so the session continues soon
    released: bool = False  # the client has said that the session is over


UNKNOWN_USE = Use()


class Eviction(ABC, Generic[K]):
    """Orders cached entries. What is added last and used by nobody known is usually given up last."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # Fields of the config, passed to the constructor as keywords.

    @abstractmethod
    def append(self, key: K, use: Use = UNKNOWN_USE) -> None:
        """Add an entry that was just used. The tail of a sequence is added before its head."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Remove an entry that is used again, or whose contents are gone."""

    @abstractmethod
    def evict(self, count: int) -> list[K]:
        """Choose `count` entries, remove them and return them, first the one given up first."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[K]:
        """The entries in the order in which they would be given up now."""


EVICTIONS: Registry[type[Eviction[Any]]] = Registry("eviction", "chairlift.core.evictions", grouped=True)


@EVICTIONS.register("lru")
class LRUEviction(Eviction[K]):
    """Gives up what was not used for the longest time."""

    name = "lru"

    def __init__(self) -> None:
        self._entries: OrderedDict[K, None] = OrderedDict()

    def append(self, key: K, use: Use = UNKNOWN_USE) -> None:
        self._entries[key] = None

    def remove(self, key: K) -> None:
        del self._entries[key]

    def evict(self, count: int) -> list[K]:
        return [self._entries.popitem(last=False)[0] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)


def make_eviction(name: str) -> Eviction[Any]:
    """Build the eviction called `name`."""
    return make_choice(EVICTIONS, name, {})
