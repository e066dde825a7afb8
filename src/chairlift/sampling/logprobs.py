"""Log-probabilities of the sampled tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.core.sampling.logprobs import TokenLogprobs
from chairlift.layers import rows


def token_logprobs(
    raw: Tensor, tokens: Sequence[int], top_n: Sequence[int], *, one_by_one: bool = False
) -> list[TokenLogprobs]:
    """Logprob, rank and top-n of each row's token. raw: [R, V], the logits before any change.

    Tokens are ordered by logit rather than by logprob, which rounding could make equal.
    """
    logprobs = log_softmax(raw, one_by_one=one_by_one)
    chosen = torch.tensor(tokens, device=raw.device)[:, None]
    # Comparing into floats is several times faster than into booleans, and exact: a vocabulary is below 2**24.
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
    """[R, V] -> [R, V]. `one_by_one`: each row by itself in aligned memory, as the order of a sum depends on both."""
    if not one_by_one:
        return logits.log_softmax(dim=-1)
    return rows.one_by_one(lambda row: row.clone().log_softmax(dim=-1), logits)


def top_ids(logits: Tensor, n: int) -> Tensor:
    """The ids [R, n] of each row's highest logits, highest first, the lower id first among equals.

    `topk` leaves the order of equals open. One more value than needed shows the rows where that decides which ids are
    in the list; they are few and are computed again with a stable sort.
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
