"""Log-probabilities of the sampled tokens and of the most likely ones, and the candidates of beams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.core.plan import Candidates, Chunk, TokenLogprobs
from chairlift.layers import rows


def token_logprobs(
    raw: Tensor, tokens: Sequence[int], top_n: Sequence[int], *, one_by_one: bool = False
) -> list[TokenLogprobs]:
    """Return the logprob, the rank and the top n of each row's token. raw: [R, V], the unedited logits.

    Tokens are ordered by logit rather than by logprob, which rounding could make equal.
    """
    logprobs = log_softmax(raw, one_by_one=one_by_one)
    chosen = torch.tensor(tokens, device=raw.device)[:, None]
    # A float result is several times faster than a boolean one, and exact for vocabularies below 2**24.
    above = torch.gt(raw, raw.gather(1, chosen), out=torch.empty_like(raw))
    ranks = above.sum(dim=-1).long() + 1
    ids = top_ids(raw, max(top_n))  # [R, n]
    listed = torch.cat([chosen, ids], dim=1)
    entries = zip(tokens, top_n, ranks.tolist(), listed.tolist(), logprobs.gather(1, listed).tolist(), strict=True)
    return [
        TokenLogprobs(token, values[0], rank, tuple(zip(found[1 : n + 1], values[1 : n + 1], strict=True)))
        for token, n, rank, found, values in entries
    ]


def log_softmax(logits: Tensor, *, one_by_one: bool) -> Tensor:
    """Compute log-probabilities [R, V] -> [R, V].

    With `one_by_one`, each row is computed alone in aligned memory: the order of a sum depends on both.
    """
    if not one_by_one:
        return logits.log_softmax(dim=-1)
    return rows.one_by_one(lambda row: row.clone().log_softmax(dim=-1), logits)


def top_ids(logits: Tensor, n: int) -> Tensor:
    """Return the ids [R, n] of each row's highest logits, highest first, the lower id first among equals.

    `topk` does not define the order of equals. One more value than needed reveals the few rows where this affects the
    result; they are sorted again with a stable sort.
    """
    n = min(n, logits.shape[1])
    values, ids = logits.topk(min(n + 1, logits.shape[1]))
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if 0 < n < logits.shape[1]:
        (tied,) = (values[:, n - 1] == values[:, n]).nonzero(as_tuple=True)
        if len(tied):
            ids[tied] = logits[tied].sort(dim=-1, descending=True, stable=True).indices[:, : n + 1]
    return ids[:, :n]


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
