"""What may come next after each beam of a search."""

from __future__ import annotations

import torch
from torch import Tensor

from chairlift.core.beam_search import Candidates
from chairlift.core.plan import StepPlan
from chairlift.execution.sampler_logprobs import top_ids


def beam_candidates(plan: StepPlan, logits: Tensor) -> dict[str, Candidates]:
    """The likeliest next tokens of every beam in a step, by request id, from the logits [S, V] of all that sample."""
    wanted, row = {}, 0
    for chunk in plan.chunks:
        if chunk.samples and chunk.request.group is not None:
            wanted[row] = chunk.request.id, chunk.request.group.search.num_candidates
        row += chunk.num_scored
    if not wanted:
        return {}
    chosen = logits.index_select(0, torch.tensor([*wanted], device=logits.device)).float()
    ids = top_ids(chosen, max(count for _, count in wanted.values()))
    logprobs = chosen.log_softmax(dim=-1).gather(1, ids)
    return {
        request_id: Candidates(tokens[:count], values[:count])
        for (request_id, count), tokens, values in zip(wanted.values(), ids.tolist(), logprobs.tolist(), strict=True)
    }
