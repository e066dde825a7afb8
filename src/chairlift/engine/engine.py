"""The engine: requests in, events out, one step at a time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from chairlift.core.adapters import AdapterUse, salted
from chairlift.core.cost_model import CostModel
from chairlift.core.events import Event, RequestFinished, StepDone, TextProduced, TokenProduced, completion_ids
from chairlift.core.executor import Executor
from chairlift.core.images import PromptImage
from chairlift.core.plan import BAD_LOGITS, StepPlan
from chairlift.core.policies.base import Policy
from chairlift.core.request import Ending, FinishReason, Request, RequestLimits
from chairlift.core.sampling.params import MAX_SEED, SamplingParams
from chairlift.core.sampling.randomness import child_seed
from chairlift.core.sampling.structure import Structure
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.engine.adapters import EngineAdapters
from chairlift.engine.output import CompletionSelection, OutputText, with_logprobs
from chairlift.engine.pipeline import Pipeline
from chairlift.engine.validation import RequestValidator
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.structured.output import StructuredOutput
from chairlift.text.reasoning_formats.base import ReasoningFormat
from chairlift.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chairlift.engine.kv_events import KVEvents

GRAMMAR_POLL = 0.005  # seconds that a step with nothing to compute waits for a grammar
ADAPTER_POLL = 0.005  # the same for an adapter that is being read
LOAD_POLL = 0.05  # The same for blocks that are being loaded: a report ends the wait.
NO_STEP = StepPlan(step=0, chunks=())


@dataclass(eq=False, repr=False)
class Engine:
    """Continuous batching around a scheduler and an executor.

    >>> engine.submit(tokenizer.encode("Hello"), SamplingParams(max_tokens=8))
    >>> while engine.has_work:
    ...     for event in engine.step():
    ...         print(event)
    """

    scheduler: Scheduler
    executor: Executor
    tokenizer: Tokenizer
    _: KW_ONLY
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int] = frozenset()
    end_strings: Sequence[str] = ()  # stop strings of every request
    seed: InitVar[int | None] = None
    cost_model: CostModel = field(default_factory=CostModel)  # It learns from every step.
    structured: StructuredOutput | None = None
    adapters: EngineAdapters | None = None
    kv_events: KVEvents | None = None  # publishes what happens to cached blocks
    generates: InitVar[bool] = True
    # Where the tokens of a prompt with images stand, for models that place images in two dimensions.
    rotary_positions: Callable[[Sequence[int], Sequence[PromptImage]], object] | None = None
    clock: Callable[[], float] = time.monotonic
    fatal: Exception | None = field(default=None, init=False)  # the error that stopped the engine for good

    def __post_init__(self, seed: int | None, generates: bool) -> None:
        self.limits, can = RequestLimits(self.vocab_size, self.max_model_len), self.executor.capabilities
        self._validator = RequestValidator(self.limits, self.scheduler, self.structured, self.eos_ids, can, generates)
        self._pipeline = Pipeline(self.scheduler, can.steps_ahead)
        self._texts: dict[str, OutputText] = {}  # Only requests that are detokenized have one.
        self._selection = CompletionSelection()
        self._seeds = random.Random(seed)
        self._num_submitted = 0
        self._unreported: set[str] = set()  # ids whose ending has not been published yet
        self._listeners: list[Callable[[Sequence[Event]], None]] = []
        if self.kv_events is not None:
            self.scheduler.kv.index.observer = self.kv_events
            self.subscribe(self.kv_events.flush)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model writes its reasoning; None if it has none."""
        return self.structured.reasoning_format if self.structured else None

    # ---- requests in ----------------------------------------------------------------------------------------------

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
        targets: Targets = NO_TARGETS,
        service_class: str = "",
        lora: Any = None,
        images: Sequence[PromptImage] = (),
    ) -> list[str]:
        """Queue a prompt; return one id for each of the `params.n` completions, of which the first is `request_id`.

        `timeout` is in seconds from now. Requests with different `cache_salt`s never share cached prefixes. With the
        order "priority", a lower `priority` is admitted first; with "fair", tenants get equal or weighted shares; with
        "slack" or "edf", `targets` decide. `lora` names an adapter, or several with their weights. With `beam_width` or
        `best_of`, all events of the completions come when the best are known.

        Raises InvalidParameter before anything is queued. Only a structure that cannot be compiled may show later, as
        an ending that names the parameter.
        """
        self.check_alive()
        max_new_tokens = self.check(prompt, params, timeout, priority, targets, images)
        adapters = self.find_adapters(lora)
        places = self.rotary_positions(prompt, images) if images and self.rotary_positions is not None else None
        now = self.clock()
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
                params if params.best_of is None else with_logprobs(params),
                max_new_tokens=max_new_tokens,
                arrival=now,
                seed=child_seed(seed, index),
                eos_ids=self.eos_ids,
                deadline=None if timeout is None else now + timeout,
                salt=salted(cache_salt, adapters),
                adapters=adapters,
                leader=requests[0] if requests else None,
                priority=priority,
                tenant=tenant,
                targets=targets,
                service_class=service_class,
                images=images,
                rotary_positions=places,
            )
            requests.append(request)
            self._unreported.add(one_id)
            if params.detokenize:
                self._texts[one_id] = OutputText(self.tokenizer, request, self.end_strings)
            if self.structured is not None and params.has_masks:
                self.structured.open(request)
        self._queue(requests, now)
        return ids[: params.n]

    def _queue(self, requests: Sequence[Request], now: float) -> None:
        if requests[0].params.beam_width is not None:
            self.scheduler.submit_beams(requests, now)
        else:
            for request in requests:
                self.scheduler.submit(request, now)

    def _check_unused(self, request_ids: Sequence[str]) -> None:
        """An id stays in use until its ending is published: an event must not be about two requests."""
        for request_id in request_ids:
            in_use = self.scheduler.get(request_id) is not None or self._selection.holds(request_id)
            if in_use or request_id in self._unreported:
                raise InvalidParameter("request_id", f"{request_id!r} is already in use")

    def check(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        timeout: float | None = None,
        priority: int = 0,
        targets: Targets = NO_TARGETS,
        images: Sequence[PromptImage] = (),
    ) -> int:
        """Raise InvalidParameter if this cannot be served; return how many tokens it may generate."""
        return self._validator.check(prompt, params, timeout, priority, targets, images)

    def find_adapters(self, lora: Any) -> tuple[AdapterUse, ...]:
        """The adapters that a request names; raises if there are none such."""
        if lora is None:
            return ()
        if self.adapters is None:
            raise InvalidParameter("lora", "this engine has no adapters; start it with lora or max_loras")
        return self.adapters.resolve(lora)

    def compile(self, structure: Structure) -> None:
        """Compile the grammar of a structure and wait for it; raise if that fails."""
        self._validator.structures(structure).compile(structure)

    def cancel(self, request_id: str) -> bool:
        """End a request; False if it is unknown or over. Its last events come with the next step.

        The completions of a beam search, or those that `best_of` compares, end together.
        """
        ending, now = Ending(FinishReason.CANCELLED), self.clock()
        ended = [self.scheduler.finish(one_id, ending, now) for one_id in self._selection.compared_with(request_id)]
        return any(ended)

    def expect_no_more(self) -> None:
        """Let a static or dynamic batch start before it is full: nothing more is submitted soon."""
        self.scheduler.expect_no_more()

    def switch_policy(self, policy: Policy) -> None:
        """Admit requests by `policy` from the next step on; running requests go on."""
        self.scheduler.switch_policy(policy)

    # ---- state ----------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[Sequence[Event]], None]) -> None:
        """Call `listener` with the events of every step."""
        self._listeners.append(listener)

    @property
    def has_work(self) -> bool:
        """Whether another step would compute or report anything."""
        return self.scheduler.has_work or self.scheduler.has_events or bool(self._pipeline)

    def now(self) -> float:
        """The time on the engine's clock, which all events carry."""
        return self.clock()

    def pause(self) -> float:
        """Seconds until a step has something to do if nothing is submitted before.

        0 with work at hand, infinity without any, and in between if a static or dynamic batch waits to be filled.
        """
        if self._pipeline or self.scheduler.has_events:
            return 0.0
        now = self.clock()
        wakeup = self.scheduler.next_wakeup(now)
        return math.inf if wakeup is None else wakeup - now

    def check_alive(self) -> None:
        """Raise if a step failed for good."""
        if self.fatal is not None:
            raise EngineDead(f"the engine stopped after an error: {self.fatal}") from self.fatal

    def prepare(self) -> bool:
        """Let the executor do one piece of work for later steps, which takes a fraction of a second.

        False if there are requests to serve instead, or nothing is left to prepare.
        """
        if self.fatal is not None or not math.isinf(self.pause()):
            return False
        try:
            return self.executor.prepare()
        except Exception as error:  # It ends the engine, as in a step.
            self._die(error)
            return False

    def shut_down(self) -> None:
        """Stop the threads of grammars, adapters and images, and write what the disk tier is still to get."""
        if self.structured is not None:
            self.structured.shut_down()
        if self.adapters is not None:
            self.adapters.shut_down()
        self.executor.close()
        self.scheduler.close_tiers()
        if self.kv_events is not None:
            self.kv_events.close()

    # ---- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plan one ragged batch, compute it, and return all events since the last call.

        With an executor that works ahead, these are the events of the step before (see pipeline.py).
        """
        now, plan = self.clock(), NO_STEP
        try:
            self._admit_compiled(now)
            self._advance_adapters(now)
            if self._pipeline.begin(now):
                plan = self.scheduler.schedule(now)  # It chooses which tokens of which requests, and reserves blocks.
            if plan:
                self._launch(plan)  # one ragged forward pass, one batched sampling
            done = self._apply_due(plan)  # tokens are appended, full blocks indexed, finished requests freed
        except Exception as error:
            return self._die(error)
        except BaseException:  # Ctrl-C: the steps in flight are lost, the engine is not
            self._abandon(plan)
            raise
        return self._publish(done)  # one stream for text, metrics and tests

    def _admit_compiled(self, now: float) -> None:
        """Let requests whose grammar has been compiled be admitted; end those whose grammar could not be."""
        for request_id, ending in self.structured.newly_compiled() if self.structured else ():
            if ending is None:
                self.scheduler.make_ready(request_id)
            else:
                self.scheduler.finish(request_id, ending, now)

    def _advance_adapters(self, now: float) -> None:
        """Place adapters that have been read; end the requests that wait for one that could not be."""
        for adapter, error in self.adapters.advance() if self.adapters else ():
            ending = Ending(FinishReason.ERROR, f"the adapter {adapter.name!r} could not be loaded: {error}", "lora")
            self.scheduler.finish_users(adapter, ending, now)

    def _launch(self, plan: StepPlan) -> None:
        scheduled = self.clock()
        self._pipeline.add(plan, self.executor.launch(plan), scheduled)

    def _apply_due(self, plan: StepPlan) -> list[StepDone]:
        """Read and apply the oldest step in flight, if it is due after launching `plan`."""
        step = self._pipeline.due(launched=bool(plan))
        if step is None:
            if self.structured is not None and not plan:
                self.structured.wait_for_compiler(GRAMMAR_POLL)  # instead of asking it all the time
            if self.adapters is not None and not plan:
                self.adapters.wait(ADAPTER_POLL)
            if not plan:
                self.scheduler.wait_for_loads(LOAD_POLL)
            return []
        result = step.pending.result()
        read = self.clock()
        self.scheduler.apply(result, read, self._ending)
        return [self._pipeline.finish(step, result, self.cost_model, read, self.clock())]

    def _ending(self, request: Request, token: int) -> Ending | None:
        """The ending that a request's text or grammar calls for after its last token, or after BAD_LOGITS."""
        text = self._texts.get(request.id)
        stop = text.push(request, token) if text is not None and token != BAD_LOGITS else None
        if stop is not None:
            return Ending(FinishReason.STOP, stop or None)
        return self.structured.ending(request) if self.structured else None

    def _publish(self, done: Sequence[StepDone]) -> list[Event]:
        """The scheduler's events with text added after the tokens that completed it, given to all listeners."""
        events: list[Event] = []
        for event in self.scheduler.drain_events():
            if isinstance(event, TokenProduced):
                events.append(event)
                text = self._texts.get(event.request_id)
                if text is not None:
                    _add_text(events, event, text.take())
                continue
            if isinstance(event, RequestFinished):
                text = self._texts.pop(event.request_id, None)
                if text is not None:
                    _add_text(events, event, text.close())
                self._close(event.request_id)
            events.append(event)
        events = self._selection.filter(events)
        events.extend(done)
        for listener in self._listeners:
            listener(events)
        return events

    def _close(self, request_id: str) -> None:
        self.executor.forget(request_id)
        if self.structured is not None:
            self.structured.close(request_id)
        self._unreported.discard(request_id)

    # ---- steps that fail ------------------------------------------------------------------------------------------

    def _die(self, error: Exception) -> list[Event]:
        """Give every open request its ending and accept no more: a step failed for good."""
        self.fatal = error
        self._pipeline.drop()
        self.scheduler.speculation = None  # it may be what failed, and every ending would call it
        ending = Ending(FinishReason.ERROR, f"{type(error).__name__}: {error}")
        now = self.clock()
        for request_id in self.scheduler.open_requests():
            self.scheduler.finish(request_id, ending, now)
        return self._publish([])

    def _abandon(self, plan: StepPlan) -> None:
        """Set back the requests of interrupted steps: they compute those tokens again."""
        plans = self._pipeline.drop()
        for lost in plans if plan in plans else [*plans, plan]:
            self.scheduler.abandon(lost, self.clock())
            for chunk in lost.chunks:
                self.executor.forget(chunk.request.id)


def _add_text(events: list[Event], cause: TokenProduced | RequestFinished, text: str) -> None:
    if text:
        events.append(TextProduced(cause.time, cause.request_id, text))
