"""A request of a simulation, and the scheduler's picture of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.core.events import RequestFinished, RequestPreempted, TokenProduced
from chairlift.core.kv.eviction import Pile
from chairlift.core.request import Request, Status
from chairlift.core.sampling_params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.lab.simulator.records import Record

_LAST_TOKEN = 2**32 - 1
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


class Rider:
    """A request that is open. Most come and go without the scheduler having to be asked about them."""

    __slots__ = (
        "block_digests",
        "known",
        "num_found",
        "order",
        "pile",
        "prompt",
        "record",
        "request",
        "shared",
        "since",
    )
    salt = ""

    def __init__(self, record: Record, prompt: Sequence[int], order: int) -> None:
        self.record = record
        self.prompt = prompt
        self.order = order  # place in the order of submission
        self.request: Request | None = None  # what the scheduler was shown
        self.since = 0  # steps that had been taken when it was set aside (`cruise.py`) ...
        self.known = 0  # ... and how many tokens it knew then
        self.block_digests: list[bytes] = []  # of its prompt
        # While the scheduler does not know it, with a prefix cache (`late_index.py`):
        self.shared: Sequence[int] = ()  # blocks with the beginning of its prompt that were there before it ...
        self.num_found = 0  # ... and how many tokens that is
        self.pile: Pile | None = None  # those with the rest of it, in the cache since it has ended

    @property
    def tokens(self) -> Sequence[int]:
        return self.prompt

    @property
    def num_known(self) -> int:
        """Its tokens, while it waits."""
        return self.record.n_in if self.request is None else self.request.num_known

    @property
    def num_computed(self) -> int:
        """Of those, the ones that it found in the prefix cache when it boarded."""
        return self.num_found if self.request is None else self.request.num_computed


def token_of(request: Request) -> int:
    """What is generated does not matter, only how much. Nobody else's prompt or output has this token."""
    return _LAST_TOKEN - request.order


def quick_digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """For a prefix index: equal blocks after equal prefixes have equal ones, and that is all a simulation asks for."""
    return hash((parent, tokens)).to_bytes(8, "little", signed=True)


class Passengers:
    """The riders that the scheduler knows of."""

    def __init__(self, scheduler: Scheduler, ended: Callable[[Record], None]) -> None:
        self.preemptions = 0
        self._scheduler = scheduler
        self._ended = ended
        self._riders: dict[str, Rider] = {}

    def show(self, rider: Rider) -> Request:
        """Let the scheduler know, as if it had been told when the rider came."""
        record = rider.record
        request = Request(str(rider.order), rider.prompt, _GREEDY, max_new_tokens=record.n_out, arrival=record.arrival)
        request.order = rider.order
        request.block_digests = rider.block_digests
        rider.request = request
        self._riders[request.id] = rider
        self._scheduler.submit(request, record.arrival)
        return request

    def show_on_board(self, rider: Rider) -> Request:
        request = self.show(rider)
        self.seat(request)
        return request

    def seat(self, request: Request) -> None:
        self._scheduler.waiting.remove(request)
        request.status = Status.RUNNING

    def rider(self, request: Request) -> Rider:
        return self._riders[request.id]

    def take_in_events(self) -> None:
        for event in self._scheduler.drain_events():
            if isinstance(event, TokenProduced):
                record = self._riders[event.request_id].record
                if record.first_token is None:
                    record.first_token = event.time
            elif isinstance(event, RequestFinished):
                self.end(self._riders.pop(event.request_id), event.time)
            elif isinstance(event, RequestPreempted):
                self.preemptions += 1

    def end(self, rider: Rider, now: float) -> None:
        rider.record.end = now
        self._ended(rider.record)
