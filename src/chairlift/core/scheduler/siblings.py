"""Completions of one prompt (n > 1): the first one admitted computes the prompt, the others share its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.request import Request, Status


def sibling_to_fork(request: Request, running: Sequence[Request]) -> Request | None:
    """Find a running sibling whose prompt is computed, so that its prompt blocks can be shared."""
    siblings = _running_siblings(request, running)
    return next((other for other in siblings if other.num_computed >= other.num_prompt), None)


def waits_for_sibling(request: Request, running: Sequence[Request]) -> bool:
    """Whether `request` must wait until a sibling has computed the prompt that they share."""
    leader = request.leader
    if leader is None or request.num_output or sibling_to_fork(request, running) is not None:
        return False
    return leader.status is Status.WAITING or bool(_running_siblings(request, running))


def _running_siblings(request: Request, running: Sequence[Request]) -> list[Request]:
    """Running completions of the same prompt; none once `request` has output."""
    leader = request.leader
    if leader is None or request.num_output:
        return []
    return [other for other in running if other is leader or other.leader is leader]
