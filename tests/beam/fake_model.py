"""Beam searches with a fake model whose scores depend only on the tokens of a beam, like those of a real model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from chairlift.core.events import completion_ids
from chairlift.core.plan import Candidates, StepPlan, StepResult
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from tests.core.driving import deterministic_token

VOCAB = 16
EOS = 3


def logprobs_after(tokens: Sequence[int]) -> list[float]:
    rng = random.Random(hash(tuple(tokens[-3:])))
    weights = [rng.random() ** 4 + 1e-6 for _ in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def candidates_of(request: Request) -> Candidates:
    assert request.group is not None
    scores = logprobs_after(request.tokens)
    ids = sorted(range(VOCAB), key=lambda token: -scores[token])[: request.group.num_candidates]
    return Candidates(ids, [scores[token] for token in ids])


def run_plan(plan: StepPlan) -> StepResult:
    sampling = [chunk.request for chunk in plan.chunks if chunk.samples]
    tokens = [0 if request.group else deterministic_token(request) for request in sampling]
    found = {request.id: candidates_of(request) for request in sampling if request.group}
    return StepResult(plan, tokens, [None] * len(tokens), candidates=found)


def submit_beams(
    scheduler: Scheduler,
    name: str,
    prompt: Sequence[int],
    width: int,
    new: int = 8,
    now: float = 0.0,
    **options: object,
) -> list[Request]:
    params = SamplingParams(beam_width=width, max_tokens=new, n=width)
    eos_ids = frozenset({EOS})
    members = [
        # type: ignore[arg-type]
        Request(one, list(prompt), params, max_new_tokens=new, arrival=now, eos_ids=eos_ids, **options)
        for one in completion_ids(name, width)
    ]
    scheduler.submit_beams(members, now)
    return members
