"""The engine: requests in, events out, one step at a time."""

from __future__ import annotations

import math
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import countOf
from typing import Protocol, runtime_checkable

import numpy as np

from chairlift.core.beam.search import BeamSearch
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.events import Event, RequestFinished, StepDone, TextProduced, TokenProduced
from chairlift.core.orderings.base import PriorityOrdering
from chairlift.core.plan import BAD_LOGITS, StepPlan, StepResult
from chairlift.core.policies.base import Policy
from chairlift.core.randomness import child_seed
from chairlift.core.request import Ending, FinishReason, Request, completion_ids
from chairlift.core.sampling_params import MAX_SEED, SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.structure import Structure
from chairlift.engine.output_text import OutputText
from chairlift.engine.selection import Selection, scored
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.structured.output import StructuredOutput
from chairlift.text.tokenizer import Tokenizer

GRAMMAR_POLL = 0.005  # seconds: how long a step with nothing to compute waits for a grammar


class Executor(Protocol):
    """What runs a plan; the model runner, or a stand-in for it."""

    def run(self, plan: StepPlan) -> StepResult: ...
    def forget(self, request_id: str) -> None: ...


class PendingStep(Protocol):
    @property
    def typical(self) -> bool:
        """Whether launching it took as long as it will for later steps of its kind."""
        ...

    def result(self) -> StepResult:
        """Wait for the step."""
        ...


@runtime_checkable
class PipelinedExecutor(Executor, Protocol):
    """An executor that takes steps before the results of earlier ones were asked for."""

    steps_ahead: int  # how many

    def launch(self, plan: StepPlan) -> PendingStep: ...


@runtime_checkable
class PreparingExecutor(Executor, Protocol):
    """An executor that can use the time in which there is nothing to run."""

    def use_idle_time(self) -> bool:
        """Prepare one thing for later. False if nothing is left to prepare."""
        ...


@dataclass(frozen=True, slots=True)
class _Done:
    """The pending step of an executor that computes at once."""

    computed: StepResult
    typical: bool = True

    def result(self) -> StepResult:
        return self.computed


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    plan: StepPlan
    pending: PendingStep
    begun: float
    schedule_seconds: float
    used_blocks: int
    waited: bool  # was planned later than it could have been, for the sake of drafts


def _are_token_ids(tokens: Sequence[int], vocab_size: int) -> bool:
    """Whether all are plain integers from 0 to `vocab_size` - 1. Prompts are long: not a line of Python for each."""
    if not len(tokens):
        return True
    if countOf(map(type, tokens), int) < len(tokens):
        return False
    try:
        return int(np.frombuffer(array("I", tokens), np.uint32).max()) < vocab_size
    except OverflowError:  # below 0, or beyond 32 bits
        return False


class Engine:
    """Continuous batching around a scheduler and an executor.

    >>> engine.submit(tokenizer.encode("Hello"), SamplingParams(max_tokens=8))
    >>> while engine.has_work:
    ...     for event in engine.step():
    ...         print(event)
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        seed: int | None = None,
        cost_model: CostModel | None = None,
        structured: StructuredOutput | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        self.cost_model = cost_model or CostModel()  # taught by every step
        self.fatal: Exception | None = None  # what killed the engine, if anything did
        self._clock = clock
        self._structured = structured
        self._text = OutputText(tokenizer)
        self._selection = Selection()  # of the completions that others hear of
        self._seeds = random.Random(seed)
        self._num_submitted = 0
        self._unreported: set[str] = set()  # ids whose ending has not been published yet
        self._listeners: list[Callable[[Sequence[Event]], None]] = []
        self._under_way: deque[_StepUnderWay] = deque()
        self._steps_ahead = executor.steps_ahead if isinstance(executor, PipelinedExecutor) else 0
        self._last_step_ended = 0.0

    def subscribe(self, listener: Callable[[Sequence[Event]], None]) -> None:
        """Have `listener` called with the events of every step."""
        self._listeners.append(listener)

    @property
    def has_work(self) -> bool:
        """Whether another step would compute or report anything."""
        return self.scheduler.has_work or self.scheduler.has_events or bool(self._under_way)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
    ) -> list[str]:
        """Queue a prompt. Returns one id for each of the `params.n` completions, the first one `request_id`. With
        `beam_width` or `best_of`, all that is said of them comes when the best are known.

        `timeout` is in seconds from now. Requests with different `cache_salt`s never share cached prefixes. With the
        order "priority", a lower `priority` boards sooner; with "fair", tenants get equal (or weighted) shares.
        Whatever is wrong with a request raises here, before anything is queued; only a structure that cannot be
        compiled may show later, as an ending that names the parameter.
        """
        self.check_alive()
        max_new_tokens = self.check(prompt, params, timeout, priority)
        now = self._clock()
        seed = self._seeds.randrange(MAX_SEED) if params.seed is None else params.seed
        first_id = request_id or f"request-{self._num_submitted}"
        ids = completion_ids(first_id, params.num_sequences)
        self._check_unused(ids)
        self._num_submitted += 1
        self._selection.open(ids, params)
        requests: list[Request] = []
        for index, one_id in enumerate(ids):
            request = Request(
                one_id,
                prompt,
                params if params.best_of is None else scored(params),
                max_new_tokens=max_new_tokens,
                arrival=now,
                seed=child_seed(seed, index),
                eos_ids=self.eos_ids,
                deadline=None if timeout is None else now + timeout,
                salt=cache_salt,
                leader=requests[0] if requests else None,
                priority=priority,
                tenant=tenant,
            )
            requests.append(request)
            self._unreported.add(one_id)
            self._text.open(request)
            if self._structured is not None and params.structure is not None:
                self._structured.open(request)
        self._queue(requests, now)
        return ids[: params.n]

    def _queue(self, requests: Sequence[Request], now: float) -> None:
        if requests[0].params.beam_width is not None:
            self.scheduler.submit_beams(requests, now)
        else:
            for request in requests:
                self.scheduler.submit(request, now)

    def check_alive(self) -> None:
        """Raise if a step failed for good."""
        if self.fatal is not None:
            raise EngineDead(f"the engine stopped after an error: {self.fatal}") from self.fatal

    def check(
        self, prompt: Sequence[int], params: SamplingParams, timeout: float | None = None, priority: int = 0
    ) -> int:
        """Raise if this could not be served; return how many tokens it may generate at most."""
        if not len(prompt):
            raise InvalidParameter("prompt", "is empty; give at least one token")
        self._check_tokens("prompt", prompt)
        self._check_tokens("stop_token_ids", params.stop_ids)
        self._check_tokens("logit_bias", list(params.logit_bias or ()))
        if params.structure is not None:
            self._structures(params.structure).check(params.structure)
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise InvalidParameter("timeout", f"must be a number of seconds above 0, got {timeout!r}")
        self._check_priority(priority)
        room = self.max_model_len - len(prompt)
        if room < 1:
            problem = f"has {len(prompt)} tokens, but at most {self.max_model_len - 1} leave room for an answer"
            raise InvalidParameter("prompt", f"{problem} (max_model_len is {self.max_model_len})")
        beams = params.beam_width or 1
        if params.max_tokens is None:
            room = min(room, max(1, self.scheduler.most_new_tokens(len(prompt), beams)))
        if params.min_tokens > room:
            problem = f"{params.min_tokens} exceeds the {room} tokens that the prompt leaves of the context"
            raise InvalidParameter("min_tokens", problem)
        max_new_tokens = min(params.max_tokens or room, room)
        self.scheduler.check_fits(len(prompt), max_new_tokens, beams)
        if params.beam_width is not None:
            self._check_beams(params)
        return max_new_tokens

    def _check_beams(self, params: SamplingParams) -> None:
        if not getattr(self.executor, "finds_candidates", False):
            raise InvalidParameter("beam_width", "is not supported on this device")
        needed = BeamSearch(params, self.eos_ids, max_new_tokens=1).num_candidates
        if needed > self.vocab_size:
            problem = f"a search of this width compares {needed} tokens, but there are {self.vocab_size}"
            raise InvalidParameter("beam_width", problem)

    def compile(self, structure: Structure) -> None:
        """Compile what a request will need, and wait for it. Raise if it cannot be done."""
        self._structures(structure).compile(structure)

    def _structures(self, structure: Structure) -> StructuredOutput:
        if self._structured is None:
            raise InvalidParameter(structure.parameter, "this engine has no structured output")
        return self._structured

    def _check_tokens(self, parameter: str, tokens: Sequence[int]) -> None:
        if _are_token_ids(tokens, self.vocab_size):
            return
        for token in tokens:  # what is wrong?
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidParameter(parameter, f"token ids must be integers, got {token!r}")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            bad = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise InvalidParameter(parameter, f"token id {bad} is outside the vocabulary of {self.vocab_size}")

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
            raise InvalidParameter("priority", f"must be an integer, got {priority!r:.40}")
        ordering = self.scheduler.ordering
        if priority and not isinstance(ordering, PriorityOrdering):
            raise InvalidParameter("priority", f"has no effect in the order {ordering.name!r}; start with 'priority'")

    def _check_unused(self, request_ids: Sequence[str]) -> None:
        """An id stays in use until its ending is published: an event must not be about two requests."""
        for request_id in request_ids:
            known = self.scheduler.get(request_id) is not None or self._selection.holds(request_id)
            if known or request_id in self._unreported:
                raise InvalidParameter("request_id", f"{request_id!r} is already in use")

    def expect_no_more(self) -> None:
        """Nothing is submitted soon: a static or dynamic batch need not be full to start."""
        self.scheduler.expect_no_more()

    def pause(self) -> float:
        """Seconds until a step has something to do, unless something happens before: 0 with work at hand, without end
        if there is none, and in between if a static or dynamic batch waits to be filled."""
        if self._under_way or self.scheduler.has_events:
            return 0.0
        now = self._clock()
        wakeup = self.scheduler.next_wakeup(now)
        return math.inf if wakeup is None else wakeup - now

    def use_idle_time(self) -> bool:
        """With nothing to do, let the executor prepare one thing for later, which takes a fraction of a second.
        False if there is work instead, or nothing left to prepare."""
        if self.fatal is not None or not math.isinf(self.pause()):
            return False
        try:
            return isinstance(self.executor, PreparingExecutor) and self.executor.use_idle_time()
        except Exception as error:  # as in a step
            self._die(error)
            return False

    def switch_policy(self, policy: Policy) -> None:
        """From the next step on, requests board as `policy` says; whoever is on board stays there."""
        self.scheduler.switch_policy(policy)

    def now(self) -> float:
        """The time on the engine's clock, which all events carry."""
        return self._clock()

    def cancel(self, request_id: str) -> bool:
        """End a request; False if it is unknown or over. Its last events come with the next step. The completions of a
        beam search, or those that `best_of` compares, end together."""
        ending, now = Ending(FinishReason.CANCELLED), self._clock()
        ended = [self.scheduler.finish(one_id, ending, now) for one_id in self._selection.rivals(request_id)]
        return any(ended)

    def step(self) -> list[Event]:
        """Plan one ragged batch, compute it, and return all that happened.

        An executor that can work ahead is given the next step before the last one is read, so what is returned is
        then about the step before. But drafts follow the last token, so that with them each step is read first. With
        nothing to compute, only what happened otherwise is reported.
        """
        begun = self._clock()
        plan = StepPlan(step=0, chunks=())  # until there is one
        try:
            self._take_in_grammars(begun)
            waits = self._waits_for_tokens
            if not (waits and self._under_way):
                plan = self.scheduler.schedule(begun)
            if plan:
                self._begin(plan, begun, waits)
            may_stay = self._steps_ahead if plan and not self._waits_for_tokens else 0
            if len(self._under_way) <= may_stay:
                self._rest(plan)
                return self._publish([])
            step = self._under_way[0]
            result = step.pending.result()
            ran = self._clock()
            self.scheduler.apply(result, ran, self._ending)
            self._under_way.popleft()
            summary = self._summary(step, result, ran)
        except Exception as error:
            return self._die(error)
        except BaseException:  # Ctrl-C: the steps under way are lost, the engine is not
            self._abandon(plan)
            raise
        return self._publish([summary])

    @property
    def _waits_for_tokens(self) -> bool:
        """Whether the next step is planned once the last one is read, though the executor could work ahead."""
        speculation = self.scheduler.speculation
        return self._steps_ahead > 0 and speculation is not None and speculation.drafting

    def _begin(self, plan: StepPlan, begun: float, waited: bool) -> None:
        schedule_seconds = self._clock() - begun
        used_blocks = self.scheduler.kv.pool.num_used
        # Asked by name: whether it is a PipelinedExecutor takes as long to find out as planning six decodes.
        launch: Callable[[StepPlan], PendingStep] | None = getattr(self.executor, "launch", None)
        pending = _Done(self.executor.run(plan)) if launch is None else launch(plan)
        self._under_way.append(_StepUnderWay(plan, pending, begun, schedule_seconds, used_blocks, waited))

    def shut_down(self) -> None:
        """Stop what works beside the engine, which takes no more steps. Otherwise an exit would wait for it."""
        if self._structured is not None:
            self._structured.shut_down()

    def _take_in_grammars(self, now: float) -> None:
        for request_id, ending in self._structured.newly_compiled() if self._structured else ():
            if ending is None:
                self.scheduler.make_ready(request_id)
            else:
                self.scheduler.finish(request_id, ending, now)

    def _rest(self, plan: StepPlan) -> None:
        """Let the compiler work instead of asking it all the time, if it is all that there is to wait for."""
        if self._structured is not None and not plan:
            self._structured.wait_for_compiler(GRAMMAR_POLL)

    def _ending(self, request: Request, token: int) -> Ending | None:
        """What the text or the grammar of a request says about going on after its last token, or after BAD_LOGITS."""
        stop = self._text.push(request, token) if token != BAD_LOGITS else None
        if stop is not None:
            return Ending(FinishReason.STOP, stop)
        return self._structured.ending(request) if self._structured else None

    def _summary(self, step: _StepUnderWay, result: StepResult, ran: float) -> StepDone:
        shape = StepShape.of(step.plan)
        ended = self._clock()
        # A step that was queued behind another took its time from when that one ended.
        seconds = ended - max(step.begun, self._last_step_ended)
        self._last_step_ended = ended
        predicted = self.cost_model.predict(shape) or None
        speculation = self.scheduler.speculation
        # Steps that were launched before this one was read took their time out of this one's.
        typical = all(one.pending.typical for one in (step, *self._under_way))
        running = seconds if speculation is None else speculation.observe(result, seconds, step.waited, typical)
        if typical:
            self.cost_model.observe(shape, running)
        return StepDone(
            time=ran,
            step=step.plan.step,
            decode_tokens=shape.decode_tokens,
            prefill_tokens=shape.prefill_tokens,
            requests=shape.requests,
            waiting=len(self.scheduler.waiting),
            used_blocks=step.used_blocks,
            total_blocks=self.scheduler.kv.num_blocks,
            schedule_seconds=step.schedule_seconds,
            apply_seconds=ended - ran,
            timing=result.timing,
            padding_tokens=result.padding_tokens,
            seconds=seconds,
            predicted_seconds=predicted,
            speedup=None if speculation is None else speculation.speedup,
            plan=step.plan,
        )

    def _die(self, error: Exception) -> list[Event]:
        """A step failed for good: give every open request its ending, and take no more work."""
        self.fatal = error
        self._under_way.clear()
        self.scheduler.speculation = None  # it may be what failed, and would be told of every ending
        ending = Ending(FinishReason.ERROR, f"{type(error).__name__}: {error}")
        now = self._clock()
        for request_id in self.scheduler.open_requests():
            self.scheduler.finish(request_id, ending, now)
        return self._publish([])

    def _abandon(self, plan: StepPlan) -> None:
        """Steps were interrupted: their requests compute those tokens again, and forget what was half done."""
        plans = [step.plan for step in self._under_way]
        self._under_way.clear()
        for lost in plans if plan in plans else [*plans, plan]:
            self.scheduler.abandon(lost, self._clock())
            for chunk in lost.chunks:
                self.executor.forget(chunk.request.id)

    def _publish(self, more: Sequence[Event]) -> list[Event]:
        """The scheduler's events with the text woven in, each piece right after the tokens that completed it."""
        events: list[Event] = []
        for event in self.scheduler.drain_events():
            if isinstance(event, TokenProduced):
                events.append(event)
                self._add_text(events, event, self._text.take(event.request_id))
                continue
            if isinstance(event, RequestFinished):
                self._add_text(events, event, self._text.close(event.request_id))
                self.executor.forget(event.request_id)
                if self._structured is not None:
                    self._structured.close(event.request_id)
                self._unreported.discard(event.request_id)
            events.append(event)
        events = self._selection.pass_on(events)
        events.extend(more)
        for listener in self._listeners:
            listener(events)
        return events

    def _add_text(self, events: list[Event], cause: TokenProduced | RequestFinished, text: str) -> None:
        if text:
            events.append(TextProduced(cause.time, cause.request_id, text))
