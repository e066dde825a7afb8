"""Messages to the front end about the events of one step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from chairlift.core.events import (
    BudgetDecided,
    DraftsVerified,
    Event,
    PromptPooled,
    PromptScored,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    StepDone,
    TextProduced,
    TokenProduced,
)
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.server.wire.messages import Refused, StepReport, Update

OUTPUT_EVENTS = (TokenProduced, TextProduced)  # the most frequent events
CLIENT_EVENTS = (*OUTPUT_EVENTS, PromptScored, PromptPooled, RequestAdmitted, RequestFinished)  # become updates


def step_messages(events: Sequence[Event], scheduler: Scheduler) -> list[Refused | StepReport]:
    """Return the messages about one step, in the order of sending."""
    others = [event for event in events if not isinstance(event, OUTPUT_EVENTS)]
    return [*_refusals(others), _step_report(events, others, scheduler)]


def _refusals(events: Sequence[Event]) -> list[Refused]:
    """Return refusals of requests that failed because of a parameter or may be retried."""
    endings = [(event.request_id, event.ending) for event in events if isinstance(event, RequestFinished)]
    return [
        Refused(request_id, ending.parameter, str(ending.detail))
        for request_id, ending in endings
        if ending.parameter is not None or ending.temporary
    ]


def _step_report(events: Sequence[Event], others: Sequence[Event], scheduler: Scheduler) -> StepReport:
    """Build the report; `others` are the events except OUTPUT_EVENTS."""
    report = StepReport(
        updates=collect_updates(events),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        wait_reasons={reason.label: count for reason, count in scheduler.waiting.reasons().items()},
        lookups=_lookups(others),
        used_blocks=scheduler.kv.pool.num_used,
        total_blocks=scheduler.kv.pool.num_blocks,
        states=None if scheduler.kv.states is None else scheduler.kv.states.usage,
        preemptions=sum(isinstance(event, RequestPreempted) for event in others),
    )
    for event in others:
        if isinstance(event, StepDone):
            report = msgspec.structs.replace(
                report,
                decode_tokens=event.decode_tokens,
                prefill_tokens=event.prefill_tokens,
                requests=event.requests,
                seconds=event.seconds,
                part_seconds=_parts(event),
                predicted_seconds=event.predicted_seconds,
                speedup=event.speedup,
                **_drafts(others),
            )
        elif isinstance(event, BudgetDecided):
            limit, reason = event.limits.prefill_tokens, event.limits.reason.name.lower()
            report = msgspec.structs.replace(report, prefill_limit=limit, limit_reason=reason)
    return report


def _drafts(events: Sequence[Event]) -> dict[str, Any]:
    verified = [event for event in events if isinstance(event, DraftsVerified)]
    if not verified:
        return {}
    positions = range(max(event.proposed for event in verified))
    return {
        "verifications": len(verified),
        "proposed_at": [sum(event.proposed > position for event in verified) for position in positions],
        "accepted_at": [sum(event.accepted > position for event in verified) for position in positions],
    }


def _parts(done: StepDone) -> dict[str, float]:
    timing = done.timing
    return {
        "schedule": done.schedule_seconds,
        "build": timing.build,
        "forward": timing.forward,
        "sample": timing.sample,
        "apply": done.apply_seconds,
    }


def _lookups(events: Sequence[Event]) -> dict[str, int]:
    """Count prefix cache lookups by result: "all_found", or the reason of the miss."""
    admitted = [event for event in events if isinstance(event, RequestAdmitted)]
    return dict(Counter(event.miss.name.lower() if event.miss else "all_found" for event in admitted))


def collect_updates(events: Sequence[Event]) -> list[Update]:
    """Group the events of one step by completion. Must be fast, since the engine waits for it."""
    updates: dict[str, Update] = {}
    for event in events:
        if not isinstance(event, CLIENT_EVENTS):
            continue
        update = updates.get(event.request_id)
        if update is None:
            update = updates[event.request_id] = Update(event.request_id)
        if isinstance(event, TokenProduced):
            update.tokens.append(event.token)
            if event.logprobs is not None:
                update.logprobs.append(event.logprobs)
        elif isinstance(event, TextProduced):
            update.text += event.text
        elif isinstance(event, RequestFinished):
            update.finish_reason, update.stop_reason = event.ending.reason.value, event.ending.detail
            update.score = event.score
        elif isinstance(event, PromptScored):
            update.prompt_logprobs += event.logprobs
        elif isinstance(event, PromptPooled):
            update.vector = array("f", event.vector).tobytes()
        elif update.cached_tokens is None:
            update.cached_tokens, update.admitted = event.cached_tokens, event.time
    return list(updates.values())
