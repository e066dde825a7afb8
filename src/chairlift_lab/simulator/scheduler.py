"""The engine's scheduler for a simulation, and its requests, most of which run outside of it (`steady_decodes.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.core.events import RequestAdmitted, RequestFinished, RequestPreempted, TokenProduced
from chairlift.core.kv.block_pool import Resource
from chairlift.core.plan import PlanBuilder
from chairlift.core.request import Request, Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.state import SchedulerState
from chairlift_lab.simulator.kv_cache import BlockGroup, SimulatedKVCache
from chairlift_lab.simulator.outcome import RequestRecord

_LAST_TOKEN = 2**32 - 1
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


class SimulatedState(SchedulerState):
    """Scheduler state with `num_aside` more running requests, which decode in every step."""

    num_aside = 0

    def slots_with(self, running: Sequence[Request]) -> int:
        return super().slots_with(running) + self.num_aside

    def promised(self, resource: Resource) -> int:
        return super().promised(resource) + self.num_aside

    @property
    def batch_is_over(self) -> bool:
        return super().batch_is_over and not self.num_aside


class SimulatedScheduler(Scheduler):
    """A scheduler whose steps also have the tokens of requests that are kept aside."""

    state_type = SimulatedState
    kv: SimulatedKVCache
    state: SimulatedState

    def _begin_plan(self, now: float) -> PlanBuilder:
        """The plan of a step that also has one token of each request that is kept aside."""
        builder = super()._begin_plan(now)
        builder.room -= self.state.num_aside
        builder.prefill_room = min(builder.prefill_room, builder.room)
        return builder


class SimulatedRequest:
    """An open request. Most run from arrival to end without being submitted to the scheduler."""

    __slots__ = (
        *("block_digests", "group", "length", "num_found", "order"),
        *("prompt", "record", "request", "shared", "since"),
    )
    salt = ""

    def __init__(self, record: RequestRecord, prompt: Sequence[int], order: int) -> None:
        self.record = record
        self.prompt = prompt
        self.order = order  # place in the order of submission
        self.request: Request | None = None  # its request in the scheduler, if it was submitted
        self.since = 0  # steps taken when it was set aside (`steady_decodes.py`) ...
        self.length = 0  # ... and the number of its known tokens then
        self.block_digests: list[bytes] = []  # digests of the blocks of its prompt
        # While it is not submitted, with a prefix cache (`LazyIndexing`):
        self.shared: Sequence[int] = ()  # blocks with the start of its prompt that were cached before it arrived ...
        self.num_found = 0  # ... and how many tokens that is
        self.group: BlockGroup | None = None  # blocks with the rest of its prompt, in the cache since it ended

    @property
    def tokens(self) -> Sequence[int]:
        return self.prompt

    @property
    def num_known(self) -> int:
        """Its known tokens while it waits."""
        return self.record.n_in if self.request is None else self.request.num_known

    @property
    def num_computed(self) -> int:
        """Tokens that it found in the prefix cache when it was admitted."""
        return self.num_found if self.request is None else self.request.num_computed


def token_of(request: Request) -> int:
    """The token that stands for all generated tokens of a request; no other request has it."""
    return _LAST_TOKEN - request.order


class SubmittedRequests:
    """The requests that were submitted to the scheduler."""

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        self.preemptions = 0
        self.on_start: Callable[[RequestRecord], None] = lambda record: None  # called at the first token
        self.on_end: Callable[[RequestRecord], None] = lambda record: None
        self._scheduler = scheduler
        self._by_id: dict[str, SimulatedRequest] = {}

    def submit(self, simulated: SimulatedRequest) -> Request:
        """Submit a request to the scheduler as of its arrival."""
        record = simulated.record
        request = Request(
            str(simulated.order), simulated.prompt, _GREEDY, max_new_tokens=record.n_out, arrival=record.arrival
        )
        request.order = simulated.order
        request.block_digests = simulated.block_digests
        simulated.request = request
        self._by_id[request.id] = simulated
        self._scheduler.submit(request, record.arrival)
        return request

    def submit_running(self, simulated: SimulatedRequest) -> Request:
        request = self.submit(simulated)
        self.start(request)
        return request

    def start(self, request: Request) -> None:
        """Remove a request from the queue; it runs outside of the scheduler."""
        self._scheduler.waiting.remove(request)
        request.status = Status.RUNNING

    def find(self, request: Request) -> SimulatedRequest:
        return self._by_id[request.id]

    def record_events(self) -> None:
        """Record the events of the scheduler."""
        for event in self._scheduler.drain_events():
            if isinstance(event, TokenProduced):
                self.start_output(self._by_id[event.request_id].record, event.time)
            elif isinstance(event, RequestAdmitted):
                record = self._by_id[event.request_id].record
                if record.first_token is None:
                    record.cached = event.cached_tokens
            elif isinstance(event, RequestFinished):
                self.end(self._by_id.pop(event.request_id), event.time)
            elif isinstance(event, RequestPreempted):
                self.preemptions += 1

    def start_output(self, record: RequestRecord, now: float) -> None:
        """Record the time of a token if it is the request's first."""
        if record.first_token is None:
            record.first_token = now
            self.on_start(record)

    def end(self, simulated: SimulatedRequest, now: float) -> None:
        simulated.record.end = now
        self.on_end(simulated.record)
