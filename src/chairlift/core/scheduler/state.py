"""The running, waiting and idle requests, and the transitions between them; shared by all parts of the scheduler."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from chairlift.core.adapters import AdapterPool
from chairlift.core.encoder_cache import EncoderCache
from chairlift.core.events import Event, RequestAdmitted, RequestPreempted
from chairlift.core.kv.block_pool import Resource
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.prefix_index import Miss
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.lengths import OutputLengths
from chairlift.core.orderings.base import Ordering
from chairlift.core.plan import BlockSwap, PlanBuilder
from chairlift.core.policies.base import Policy
from chairlift.core.request import Request, RequestGroup, Status
from chairlift.core.scheduler.waiting_queue import WaitingQueue
from chairlift.errors import InvalidParameter

Urgency = tuple[bool, float, int]


@dataclass(eq=False, repr=False)
class SchedulerState:
    """Every open request is in exactly one of `waiting` and `running`."""

    kv: KVCache
    policy: Policy
    ordering: Ordering
    max_batch_requests: int
    max_overtakes: InitVar[int]
    swap: SwapSpace
    lengths: OutputLengths | None = None
    adapters: AdapterPool = field(default_factory=AdapterPool)
    running: list[Request] = field(default_factory=list)  # The order is that of submission, as in `waiting`.
    idle: list[Request] = field(default_factory=list)  # finished ones that keep slot and blocks until their batch ends
    # Open requests, and finished ones that still hold blocks; the keys are ids.
    requests: dict[str, Request] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    images: EncoderCache | None = None  # what is encoded of images, if the model reads any

    def __post_init__(self, max_overtakes: int) -> None:
        if self.max_batch_requests < 1:
            raise InvalidParameter("max_batch_requests", f"must be at least 1, got {self.max_batch_requests}")
        self.waiting = WaitingQueue(self.ordering, max_overtakes)

    # ---- slots and blocks ---------------------------------------------------------------------------------------

    @property
    def slots_taken(self) -> int:
        return self.slots_with(self.running)

    def slots_with(self, running: Sequence[Request]) -> int:
        """The slots in use with these requests running."""
        return sum(request.num_slots for request in running) + len(self.idle)

    def promised(self, resource: Resource) -> int:
        """How much of a resource running requests will still take."""
        return sum(map(resource.to_come, self.running))

    # ---- admission and preemption -------------------------------------------------------------------------------

    def admit(self, request: Request, cached_tokens: int, miss: Miss | None, now: float) -> None:
        self.waiting.remove(request)
        self.adapters.hold(request)
        insort(self.running, request, key=lambda request: request.order)
        request.status = Status.RUNNING
        self.ordering.admitted(request)
        swapped_tokens = request.num_computed - cached_tokens
        self.events.append(RequestAdmitted(now, request.id, cached_tokens, miss, swapped_tokens))

    def join(self, beam: Request, now: float) -> None:
        """Run a beam in one of the slots that its search holds."""
        self.events.append(RequestAdmitted(now, beam.id, beam.num_computed, miss=None))
        self.adapters.hold(beam)
        insort(self.running, beam, key=lambda request: request.order)
        beam.status = Status.RUNNING

    def preempt(self, victim: Request, now: float, builder: PlanBuilder | None = None) -> None:
        """Return a running request to the queue, without its blocks, its slot and its chunk of the step being planned.
        Its tokens stay known; their keys and values are swapped out or recomputed (often found in the prefix cache). A
        beam search is preempted as a whole and always recomputes."""
        if victim.group is not None:
            self._preempt_group(victim.group, now, builder)
            return
        swaps = self._swap_out(victim, builder) if builder is not None else None
        self.events.append(RequestPreempted(now, victim.id, victim.num_computed, swapped=swaps is not None))
        self._stop_running(victim, 0 if swaps is None else victim.num_computed)
        self.waiting.add(victim)
        self.end_batch_if_over()

    def _preempt_group(self, group: RequestGroup, now: float, builder: PlanBuilder | None) -> None:
        for beam in group.members:
            if beam.status is Status.RUNNING:
                self.events.append(RequestPreempted(now, beam.id, beam.num_computed))
                if builder is not None:
                    builder.drop(beam)
                self._stop_running(beam, 0)
        group.regroup()
        self.waiting.add(group.leader)
        self.end_batch_if_over()

    def _stop_running(self, victim: Request, num_computed: int) -> None:
        self.kv.release(victim)
        self.adapters.release(victim)
        self.running.remove(victim)
        victim.start_from(num_computed)
        victim.generation += 1
        victim.status = Status.WAITING

    def _swap_out(self, victim: Request, builder: PlanBuilder) -> list[BlockSwap] | None:
        chunk = builder.drop(victim)
        # Only requests admitted in this step copy blocks on write, and they are never victims in the same step. So the
        # blocks in the victim's table hold the data to swap out.
        assert chunk is None or not chunk.copies
        swaps = self.swap.swap_out(victim, self.kv)
        builder.swap_outs += swaps or ()
        return swaps

    def forget_swap(self, request: Request) -> None:
        """Let `request` recompute its tokens, because its copy to host memory may not have been made."""
        if self.swap.holds(request):
            self.swap.release(request)
            request.start_from(0)

    # ---- finished requests --------------------------------------------------------------------------------------

    @property
    def batch_is_over(self) -> bool:
        return not self.running

    def end_batch_if_over(self) -> None:
        """Free the slots and blocks of idle requests once the last request of their batch has finished."""
        if self.idle and self.batch_is_over:
            self.free_idle_slots()

    def free_idle_slots(self) -> None:
        idle, self.idle = self.idle, []
        for request in idle:
            self.release(request)

    def release(self, request: Request) -> None:
        """Release the blocks of a finished request, unless its batch is not over or a step in flight may write to them
        (then this is called again after that step)."""
        if request.steps_in_flight == 0 and request not in self.idle:
            self.kv.release(request)
            self.adapters.release(request)
            self.swap.release(request)
            del self.requests[request.id]

    def take_idle_blocks(self) -> bool:
        """Release the blocks of one idle request, so that no running one is preempted; return False if there are
        none."""
        for request in self.idle:
            if self.kv.table(request) and request.steps_in_flight == 0:
                self.kv.release(request)
                return True
        return False

    # ---- prompts ------------------------------------------------------------------------------------------------

    def unserved_prompts(self, builder: PlanBuilder) -> list[Request]:
        """Running prompts that will not be complete after this step."""
        return [request for request in self.running if not request.decoding and builder.num_behind(request)]

    def urgency(self, request: Request, builder: PlanBuilder) -> Urgency:
        """The sort key of prompts for the rest of the prefill budget: by claim, then by fewest tokens left to
        compute."""
        not_starved, claim, _ = self.ordering.rank(request)
        return not_starved, claim, builder.num_behind(request)
