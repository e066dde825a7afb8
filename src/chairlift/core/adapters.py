"""LoRA adapters as the scheduler knows them: which are in memory, which requests use them, and which leave for others.

Any number of adapters is registered. A few are *resident*: they have a slot and memory on the device. A request is
admitted when all its adapters are resident, and holds them while it runs; one that no running request holds and no
step in flight uses may be evicted, least recently used first. Loading takes time and happens elsewhere: the pool says
what is to be loaded, and is told when that is done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from chairlift.errors import InvalidParameter

NO_SLOT = -1
MOST_ADAPTERS = 4  # A request has at most these: captured steps of a GPU have room for no more.


class AdapterStatus(StrEnum):
    REGISTERED = "registered"  # It is on disk only.
    LOADING = "loading"  # It has a slot, and memory is set aside for it.
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter under one name; another one under the same name is another object, with a version of its own."""

    name: str
    version: str  # a digest of its content
    num_bytes: int  # The size of its numbers on the device.
    path: str = ""
    rank: int = 0  # the highest of any product

    status: AdapterStatus = field(default=AdapterStatus.REGISTERED, init=False)
    slot: int = field(default=NO_SLOT, init=False)
    num_users: int = field(default=0, init=False)  # running requests that hold it
    steps_in_flight: int = field(default=0, init=False)  # chunks of planned steps that use it
    wanted_by: str = field(default="", init=False)  # the waiting request that it was loaded for
    num_tokens: int = field(default=0, init=False)  # generated with it

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def is_idle(self) -> bool:
        """Whether nothing uses it: it may be evicted."""
        return self.num_users == 0 and self.steps_in_flight == 0


class AdapterUse(NamedTuple):
    """An adapter of a request, and the factor of its terms."""

    adapter: Adapter
    weight: float = 1.0


class AdapterUser(Protocol):
    """The part of a request that the pool reads."""

    @property
    def id(self) -> str: ...
    @property
    def adapters(self) -> tuple[AdapterUse, ...]: ...
    @property
    def starved(self) -> bool: ...


def salted(cache_salt: str, adapters: Sequence[AdapterUse]) -> str:
    """The salt of a request's blocks: requests share them only if their adapters and their versions are the same."""
    if not adapters:  # No salt that a client chooses may read like that of an adapter.
        return f"\0{cache_salt}" if "\0" in cache_salt else cache_salt
    return "\0".join(("lora", *(f"{use.adapter.key}*{use.weight!r}" for use in adapters), cache_salt))


class AdapterPool:
    """All registered adapters, of which at most `max_slots`, with `max_bytes` in total, are resident or loading."""

    def __init__(self, max_slots: int = 0, max_bytes: int = 0) -> None:
        self.max_slots, self.max_bytes = max_slots, max_bytes
        self._registered: dict[str, Adapter] = {}
        self._in_memory: OrderedDict[Adapter, None] = OrderedDict()  # Those with a slot, least recently used first.
        self._free_slots = list(range(max_slots))
        self._holders: dict[str, tuple[AdapterUse, ...]] = {}  # running requests by id
        self._to_load: list[Adapter] = []
        self._to_drop: list[int] = []  # slots whose memory is no longer needed
        self.num_evictions = self.num_loads = 0

    # ---- names ----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return list(self._registered)

    @property
    def registered(self) -> list[Adapter]:
        return list(self._registered.values())

    @property
    def in_memory(self) -> list[Adapter]:
        """Those with a slot, least recently used first."""
        return list(self._in_memory)

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._in_memory)

    def register(self, adapter: Adapter) -> None:
        """Add an adapter, or replace the one of this name: requests that were submitted before keep that one."""
        if not self.max_slots:
            raise InvalidParameter("lora", "this engine was started without adapters (max_loras is 0)")
        if adapter.num_bytes > self.max_bytes:
            problem = f"{adapter.name!r} takes {adapter.num_bytes:,} bytes, and {self.max_bytes:,} are for all"
            raise InvalidParameter("lora_memory", f"{problem}: raise it")
        self.unregister(adapter.name)
        self._registered[adapter.name] = adapter

    def unregister(self, name: str) -> bool:
        """Remove a name; False if there is none. Requests that were submitted with it go on."""
        adapter = self._registered.pop(name, None)
        if adapter is None:
            return False
        if adapter.status is AdapterStatus.RESIDENT and adapter.is_idle and not adapter.wanted_by:
            self._evict(adapter)
        return True

    def find(self, name: str) -> Adapter:
        adapter = self._registered.get(name)
        if adapter is None:
            known = ", ".join(list(self._registered)[:8]) or "none is registered"
            raise InvalidParameter("lora", f"no adapter {name!r:.100}; there are: {known}")
        return adapter

    def check(self, adapters: Sequence[AdapterUse]) -> None:
        """Raise if these can never be resident together."""
        most = min(self.max_slots, MOST_ADAPTERS)
        if len(adapters) > most:
            raise InvalidParameter("lora", f"{len(adapters)} adapters of one request are more than {most}")
        if len({use.adapter for use in adapters}) < len(adapters):
            raise InvalidParameter("lora", "names an adapter twice")
        if sum(use.adapter.num_bytes for use in adapters) > self.max_bytes:
            raise InvalidParameter("lora", "these adapters do not fit into lora_memory together")

    # ---- requests -------------------------------------------------------------------------------------------------

    def ready(self, request: AdapterUser) -> bool:
        """Whether all adapters of a request are resident."""
        return all(use.adapter.status is AdapterStatus.RESIDENT for use in request.adapters)

    def want(self, request: AdapterUser) -> bool:
        """Begin to load what a waiting request still needs; False if there is no room until others end."""
        own = {use.adapter for use in request.adapters}
        for use in request.adapters:
            adapter = use.adapter
            if adapter.status is AdapterStatus.REGISTERED:
                if not self._make_room(adapter, own, request):
                    return False
                adapter.status, adapter.slot = AdapterStatus.LOADING, self._free_slots.pop()
                self.num_loads += 1
                self._in_memory[adapter] = None
                self._to_load.append(adapter)
            adapter.wanted_by = adapter.wanted_by or request.id
        return True

    def hold(self, request: AdapterUser) -> None:
        """Keep the adapters of a request that begins to run."""
        if not request.adapters or request.id in self._holders:
            return
        assert self.ready(request)
        self._holders[request.id] = request.adapters
        for adapter, _ in request.adapters:
            adapter.num_users += 1
            adapter.wanted_by = ""
            self._in_memory.move_to_end(adapter)

    def release(self, request: AdapterUser) -> None:
        """Give back the adapters of a request that does not run any more, or never did."""
        for adapter, _ in request.adapters:
            if adapter.wanted_by == request.id:
                adapter.wanted_by = ""
        for adapter, _ in self._holders.pop(request.id, ()):
            adapter.num_users -= 1
            self._forget_if_replaced(adapter)

    def step_planned(self, request: AdapterUser) -> None:
        for adapter, _ in request.adapters:
            adapter.steps_in_flight += 1

    def step_ended(self, request: AdapterUser) -> None:
        for adapter, _ in request.adapters:
            adapter.steps_in_flight -= 1
            self._forget_if_replaced(adapter)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def take_loads(self) -> list[Adapter]:
        """The adapters to load now, each into its slot."""
        loads, self._to_load = self._to_load, []
        return loads

    def take_drops(self) -> list[int]:
        """The slots whose memory is to be freed, before anything is loaded into them."""
        drops, self._to_drop = self._to_drop, []
        return drops

    def loaded(self, adapter: Adapter) -> None:
        assert adapter.status is AdapterStatus.LOADING
        adapter.status = AdapterStatus.RESIDENT
        self._forget_if_replaced(adapter)

    def failed(self, adapter: Adapter) -> None:
        """An adapter could not be loaded: its slot is free."""
        assert adapter.status is AdapterStatus.LOADING
        adapter.wanted_by = ""
        self._free(adapter)

    def _make_room(self, adapter: Adapter, own: Iterable[Adapter], request: AdapterUser) -> bool:
        """Evict what is idle until the adapter fits; False, and nothing is evicted, if that is not enough."""
        victims, spare, slots = [], self.max_bytes - self.num_bytes, len(self._free_slots)
        for other in self._in_memory:
            if spare >= adapter.num_bytes and slots:
                break
            if self._may_leave(other, request) and other not in own:
                victims.append(other)
                spare, slots = spare + other.num_bytes, slots + 1
        if spare < adapter.num_bytes or not slots:
            return False
        for victim in victims:
            self.num_evictions += 1
            self._evict(victim)
        return True

    def _may_leave(self, adapter: Adapter, request: AdapterUser) -> bool:
        """One that was loaded for another waiting request stays, unless this request has been passed over too often."""
        is_reserved = adapter.wanted_by not in ("", request.id) and not request.starved
        return adapter.status is AdapterStatus.RESIDENT and adapter.is_idle and not is_reserved

    def _forget_if_replaced(self, adapter: Adapter) -> None:
        """Evict one that nothing can ask for any more."""
        is_known = self._registered.get(adapter.name) is adapter
        if not is_known and adapter.status is AdapterStatus.RESIDENT and adapter.is_idle and not adapter.wanted_by:
            self._evict(adapter)

    def _evict(self, adapter: Adapter) -> None:
        assert adapter.status is AdapterStatus.RESIDENT
        assert adapter.is_idle
        self._to_drop.append(adapter.slot)
        self._free(adapter)

    def _free(self, adapter: Adapter) -> None:
        self._free_slots.append(adapter.slot)
        del self._in_memory[adapter]
        adapter.status, adapter.slot, adapter.wanted_by = AdapterStatus.REGISTERED, NO_SLOT, ""
