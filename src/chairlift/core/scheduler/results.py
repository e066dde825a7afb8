"""Applies the result of a step: appends sampled tokens, indexes full blocks, finishes requests and frees blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.core.beam import beam_group
from chairlift.core.events import DraftsVerified, PromptPooled, PromptScored, RequestFinished, TokenProduced
from chairlift.core.executor import Speculation
from chairlift.core.plan import BAD_LOGITS, Chunk, StepPlan, StepResult
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.core.scheduler.state import SchedulerState

EndingCheck = Callable[[Request, int], Ending | None]
"""Returns the ending that a stop string or the grammar causes after a token was appended, if any. Also called with
BAD_LOGITS, which is not appended, because the grammar may have the reason."""

NO_TOKEN = "no token could be chosen: the model's scores are not finite, or the grammar allows none"


class ResultApplier:
    """Updates requests with the results of their steps."""

    def __init__(self, state: SchedulerState, speculation: Speculation | None) -> None:
        self._state = state
        self._kv = state.kv
        self._speculation = speculation

    def apply(self, result: StepResult, now: float, ends: EndingCheck | None = None) -> None:
        assert len(result.tokens) == len(result.logprobs)
        if result.bad_images and self._state.images is not None:
            works = result.plan.encoding.works
            self._state.images.abandon([work for work in works if work.key in result.bad_images])
            for request in self._state.images.users(result.bad_images):
                if request.ending is None:
                    reason = next(iter(result.bad_images.values()))
                    self.finish(request, Ending(FinishReason.ERROR, reason, "images"), now)
        reads = result.plan.reads
        num_read = 0  # sampled tokens
        for chunk in result.plan.chunks:
            request = chunk.request
            accepted = result.accepted.get(request.id, 0) if chunk.drafts else 0
            sampled = range(num_read, num_read + chunk.samples + accepted)
            num_read = sampled.stop
            self._end_step(request)
            if request.ending is not None:  # it ended while the step was in flight: release its blocks now
                self._state.release(request)
                continue
            if chunk.generation != request.generation:  # preempted meanwhile: these tokens are recomputed
                continue
            request.num_computed = chunk.known_end
            self._kv.commit(request)
            request.num_unread -= chunk.samples
            if reads and chunk.read:
                self._publish_prompt(chunk, result, now)
            if chunk.drafts:
                self._state.events.append(DraftsVerified(now, request.id, len(chunk.drafts), accepted))
            if request.group is not None and sampled:
                self._advance_beam(request, result, result.tokens[sampled.start], now, ends)
            else:
                self._append(request, result, sampled, now, ends)
            if not chunk.samples and request.prompt_only and request.num_computed == request.num_prompt:
                self.finish(request, Ending(FinishReason.LENGTH), now)
            if chunk.drafts and request.status is Status.RUNNING:
                request.rewind()
                self._kv.trim(request, request.num_computed)

    def _append(
        self, request: Request, result: StepResult, sampled: range, now: float, ends: EndingCheck | None
    ) -> None:
        """Append sampled tokens; all but the last are accepted drafts, whose keys and values are computed."""
        for index in sampled:
            if index > sampled.start:
                request.num_computed += 1
                self._kv.commit(request)
            token = result.tokens[index]
            if token == BAD_LOGITS:
                ending = ends(request, token) if ends else None
                self.finish(request, ending or Ending(FinishReason.ERROR, NO_TOKEN), now)
                return
            request.append(token)
            for adapter, _ in request.adapters:
                adapter.num_tokens += 1
            if request.first_token_at is None:
                request.first_token_at = now
            self._state.ordering.appended(request)
            self._state.events.append(TokenProduced(now, request.id, token, result.logprobs[index]))
            ending = (ends(request, token) if ends else None) or request.ending_after(token)
            if ending is not None:
                self.finish(request, ending, now)
                return

    def _publish_prompt(self, chunk: Chunk, result: StepResult, now: float) -> None:
        """Publish what the step computed from the prompt positions that a chunk read."""
        request, outputs = chunk.request, result.prompts
        request.num_read = chunk.read.stop
        if request.id in outputs.logprobs:
            self._state.events.append(PromptScored(now, request.id, outputs.logprobs[request.id]))
        if request.id in outputs.vectors:
            self._state.events.append(PromptPooled(now, request.id, outputs.vectors[request.id]))

    def _advance_beam(
        self, request: Request, result: StepResult, token: int, now: float, ends: EndingCheck | None
    ) -> None:
        """Pass the candidates of a beam to its search, which advances once it has those of all beams."""
        if token == BAD_LOGITS:
            self.finish(request, Ending(FinishReason.ERROR, NO_TOKEN), now)
            return
        group = beam_group(request)
        group.add_candidates(request, result.candidates[request.id], self._state, now)
        if group.search.over:
            group.publish(self._state, now, ends)
            self._remove(request.companions)

    def abandon(self, plan: StepPlan, now: float) -> None:
        """Handle a planned step without a result: preempt its requests, since the state of their blocks is unknown."""
        if self._state.images is not None:
            self._state.images.abandon(plan.encoding.works, plan.encoding.drops)
        for swap in plan.swap_outs:
            if swap.request.status is Status.WAITING:
                self._state.forget_swap(swap.request)
        for chunk in plan.chunks:
            request = chunk.request
            if request.steps_in_flight == 0:  # applied already
                continue
            self._end_step(request)
            if request.status is Status.FINISHED:
                self._state.release(request)
            elif request.status is Status.RUNNING:
                self._state.preempt(request, now)

    def _end_step(self, request: Request) -> None:
        """A planned step of a request is over."""
        request.steps_in_flight -= 1
        if request.adapters:
            self._state.adapters.step_ended(request)

    def finish(self, request: Request, ending: Ending, now: float) -> None:
        """End a request; a beam ends with its whole search."""
        if self._state.lengths is not None:
            self._state.lengths.ended(request, ending)
        for member in request.companions:
            assert member.ending is None
            member.ending = ending
            self._state.events.append(RequestFinished(now, member.id, ending))
        self._remove(request.companions)

    def _remove(self, requests: Sequence[Request]) -> None:
        """Remove finished requests from the batch or the queue."""
        state, first = self._state, requests[0]
        for request in requests:
            was_running = request.status is Status.RUNNING
            if was_running:
                state.running.remove(request)
            elif request is first:  # the other beams of a search are not in the queue
                state.waiting.remove(request)
            request.status = Status.FINISHED
            if self._speculation is not None:
                self._speculation.forget(request.id)
            if was_running and state.policy.keeps_slots:
                state.idle.append(request)
            else:
                state.release(request)
            if state.images is not None:
                state.images.open.pop(request.id, None)
        state.ordering.finished(first)
        state.end_batch_if_over()
