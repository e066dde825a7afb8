"""Completions of one prompt (n > 1): the first to board computes the prompt, and the others share its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.request import Request, Status


def sibling_to_fork(request: Request, running: Sequence[Request]) -> Request | None:
    """One whose blocks of the whole prompt are there to share, the partly filled last one included."""
    siblings = _siblings_on_board(request, running)
    return next((other for other in siblings if other.num_computed >= other.num_prompt), None)


def waits_for_sibling(request: Request, running: Sequence[Request]) -> bool:
    """A sibling boards once another has computed the prompt, so that they hold the prompt's blocks once."""
    leader = request.leader
    if leader is None or request.num_output or sibling_to_fork(request, running) is not None:
        return False
    return leader.status is Status.WAITING or bool(_siblings_on_board(request, running))


def _siblings_on_board(request: Request, running: Sequence[Request]) -> list[Request]:
    """Other completions of the same prompt, as long as `request` has nothing but that prompt itself."""
    leader = request.leader
    if leader is None or request.num_output:
        return []
    return [other for other in running if other is leader or other.leader is leader]
