"""The candidates for the next token of each beam of a search."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.core.beam.search import Candidates
from chairlift.core.plan import Chunk
from chairlift.sampling.logprobs import log_softmax, top_ids


def beam_candidates(chunks: Sequence[Chunk], logits: Tensor, *, one_by_one: bool = False) -> dict[str, Candidates]:
    """The most likely next tokens of every beam among `chunks`, by request id.

    logits: [S, V], a row for each chunk that samples and for each of its drafts, in the order of `chunks`.
    """
    if all(chunk.request.group is None for chunk in chunks):  # the common case
        return {}
    beams, row = {}, 0
    for chunk in chunks:
        if chunk.samples and chunk.request.group is not None:
            beams[row] = chunk.request.id, chunk.request.group.num_candidates
        row += chunk.num_scored
    if not beams:  # no beam's chunk reaches its last token
        return {}
    chosen = logits.index_select(0, torch.tensor([*beams], device=logits.device)).float()
    ids = top_ids(chosen, max(count for _, count in beams.values()))
    logprobs = log_softmax(chosen, one_by_one=one_by_one).gather(1, ids)
    return {
        request_id: Candidates(tokens[:count], values[:count])
        for (request_id, count), tokens, values in zip(beams.values(), ids.tolist(), logprobs.tolist(), strict=True)
    }
