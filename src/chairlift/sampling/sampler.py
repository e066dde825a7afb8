"""The sampler: chooses the next token of every request in a step, and reports log-probabilities.

    logits ─► masks ─► edits ─► arg max ────────────────────────► token
      │       grammar  bias,     │ greedy
      │                bans,     └► temperature ─► filters ─► draw ┘
      │                penalties                   top-k, top-p, min-p
      └──────────────────────────────────────► logprobs (of the model itself)

Rows do not affect each other. A draw uses one random number, a hash of the request's seed and the token's index, so a
seeded request gets the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chairlift.core.plan import BAD_LOGITS, Candidates, Chunk, TokenLogprobs
from chairlift.core.request import Request
from chairlift.core.sampling.params import MIN_TEMPERATURE, SamplingParams
from chairlift.core.sampling.randomness import uniform
from chairlift.errors import InvalidParameter
from chairlift.layers import rows
from chairlift.sampling.draw import (
    Filters,
    TokenMasks,
    accept_or_draw,
    apply_masks,
    draw,
    edit_logits,
    edits_of,
    filter_probabilities,
    filters_of,
    greedy,
)
from chairlift.sampling.parameters.base import EditedRow, LogitsEdit, SampledRequest


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The sampled tokens, one entry per row. BAD_LOGITS (-1) marks a row with unusable logits (NaN, infinite or all
    banned), whose request should end with an error."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]  # None for rows without logprobs, or whose token is BAD_LOGITS
    accepted: list[int] = field(default_factory=list)  # number of accepted drafts of each request


@dataclass(frozen=True, slots=True)
class _SamplingState:
    """The sampler's state of one request."""

    params: SamplingParams
    seed: int
    greedy: bool
    edits: tuple[LogitsEdit, ...]
    filters: Filters

    @property
    def takes_best(self) -> bool:
        """Whether its token is the most likely one and nothing else is asked of its logits."""
        return self.greedy and not self.edits and self.params.logprobs is None


@dataclass(frozen=True, slots=True)
class _Row:
    """One token to sample."""

    request: _SamplingState
    position: int  # the index of the token in the request's output
    drafts: Sequence[int] = ()  # draft tokens before this token
    draft: int | None = None  # draft for this token; None in the last row of a request
    draft_probabilities: Tensor | None = None  # [V]: the distribution that `draft` was drawn from, if it was drawn


class Sampler:
    """Samples on the host, with all parameters of each request."""

    def __init__(self, vocab_size: int, device: torch.device, *, one_by_one: bool = False) -> None:
        """With `one_by_one`, each row is drawn alone, so that rounding does not depend on the number of rows."""
        self.vocab_size = vocab_size
        self.device = device
        self._one_by_one = one_by_one
        self._requests: dict[str, _SamplingState] = {}

    # ---- requests --------------------------------------------------------------------------------------------------

    def follow(self, request: Request) -> None:
        """Add a request unless it was added before."""
        if request.id not in self._requests:
            self.add(
                request.id,
                request.params,
                request.prompt,
                seed=request.seed,
                eos_ids=sorted(request.eos_ids),
                output=request.output,
            )

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        seed: int,
        eos_ids: Sequence[int],
        output: Sequence[int] = (),
    ) -> None:
        """Add a request. `output` holds the tokens that it has already generated, if it was preempted."""
        if request_id in self._requests:
            raise InvalidParameter("request_id", f"{request_id!r} is already in the sampler")
        self._requests[request_id] = _SamplingState(
            params=params,
            seed=seed,
            greedy=params.temperature < MIN_TEMPERATURE or params.beam_width is not None,  # beam search does not draw
            edits=edits_of(SampledRequest(params, prompt, output, eos_ids, self.vocab_size)),
            filters=filters_of(params),
        )

    def forget(self, request_id: str) -> None:
        """Drop the state of a request, if there is any."""
        self._requests.pop(request_id, None)

    # ---- a step ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        output_lengths: Sequence[int],
        masks: TokenMasks | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        draft_probabilities: Sequence[Tensor | None] | None = None,
    ) -> SampledBatch:
        """Choose one token per row. `logits` is changed in place.

        logits: [S, V] float32, contiguous. output_lengths[i]: the number of tokens the request has generated, which is
        the index of the token chosen now. masks: the tokens allowed for structured requests.

        drafts[i]: draft tokens for the request's next tokens. The request then has a row for its next token and one for
        the token after each draft. Every row's token is chosen as if the drafts before it were the request's output;
        the tokens up to and including the first that differs from its draft are what the request would have got
        without any drafts.

        draft_probabilities[i] [drafts, V]: the distributions that those drafts were drawn from, if they were drawn.
        They are then accepted as often as possible while every token keeps the distribution it has without drafts.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        if masks is None and drafts is None and all(request.takes_best for request in requests):
            assert logits.shape == (len(requests), self.vocab_size)
            best: list[int] = greedy(logits).tolist()
            return SampledBatch(best, [None] * len(requests), [0] * len(requests))
        rows = _rows(requests, output_lengths, drafts, draft_probabilities)
        assert logits.shape == (len(rows), self.vocab_size)
        assert logits.device.type == self.device.type
        if not rows:  # the step has only unfinished prefills
            return SampledBatch([], [])
        scored = [index for index, row in enumerate(rows) if row.request.params.logprobs is not None]
        raw = _copy_rows(logits, scored) if scored else None  # The logits are edited below.

        if masks is not None:
            apply_masks(logits, masks)
        edit_logits(logits, _edited_rows(rows))
        tokens = self._choose(logits, rows)
        kept, accepted = _verify(tokens, rows)
        for index in kept:
            if tokens[index] != BAD_LOGITS:
                for edit in rows[index].request.edits:
                    edit.observe(tokens[index])
        logprobs = self._logprobs(raw, tokens, rows, scored)
        return SampledBatch([tokens[index] for index in kept], [logprobs[index] for index in kept], accepted)

    def _choose(self, logits: Tensor, rows: Sequence[_Row]) -> list[int]:
        drawn = [index for index, row in enumerate(rows) if not row.request.greedy]
        if len(drawn) == len(rows) and not self._one_by_one:
            tokens = _draw(logits, rows)
        else:
            tokens = greedy(logits)  # All rows are cheaper than a selection of the greedy ones.
            # A copy starts at aligned memory: on a GPU the order of a sum depends on the alignment too.
            for group in filter(None, [[index] for index in drawn] if self._one_by_one else [drawn]):
                tokens[group] = _draw(_copy_rows(logits, group), [rows[index] for index in group])
        chosen: list[int] = tokens.tolist()
        return chosen

    def _logprobs(
        self, raw: Tensor | None, tokens: Sequence[int], rows: Sequence[_Row], scored: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """The logprobs of the rows `scored`, from their logits `raw` as the model computed them."""
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if raw is not None:
            entries = token_logprobs(
                raw,
                [max(tokens[index], 0) for index in scored],
                [rows[index].request.params.logprobs or 0 for index in scored],
                one_by_one=self._one_by_one,
            )
            for index, entry in zip(scored, entries, strict=True):
                logprobs[index] = entry if tokens[index] != BAD_LOGITS else None
        return logprobs


def _rows(
    requests: Sequence[_SamplingState],
    output_lengths: Sequence[int],
    drafts: Sequence[Sequence[int]] | None,
    draft_probabilities: Sequence[Tensor | None] | None,
) -> list[_Row]:
    if drafts is None:
        return [_Row(request, length) for request, length in zip(requests, output_lengths, strict=True)]
    rows = []
    sources = draft_probabilities or [None] * len(requests)
    for request, length, own, source in zip(requests, output_lengths, drafts, sources, strict=True):
        known = None if request.greedy else source
        rows += [
            _Row(request, length + i, own[:i], draft, None if known is None else known[i])
            for i, draft in enumerate(own)
        ]
        rows.append(_Row(request, length + len(own), own))
    return rows


def _edited_rows(rows: Sequence[_Row]) -> list[EditedRow[LogitsEdit]]:
    return [
        EditedRow(index, edit, row.drafts)
        for index, row in enumerate(rows)
        for edit in row.request.edits
        if edit.applies(row.position)
    ]


def _draw(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """One random token per row [R] of logits [R, V], which are changed in place."""
    temperatures = torch.tensor([row.request.params.temperature for row in rows], device=logits.device)
    weights = logits.div_(temperatures[:, None]).softmax(dim=-1)
    filter_probabilities(weights, [row.request.filters for row in rows])
    uniforms = [uniform(row.request.seed, row.position) for row in rows]
    tokens = draw(weights, uniforms)
    sources = {index: row.draft_probabilities for index, row in enumerate(rows) if row.draft_probabilities is not None}
    if sources:
        tokens[[*sources]] = accept_or_draw(
            _copy_rows(weights, [*sources]),
            [uniforms[index] for index in sources],
            [rows[index].draft or 0 for index in sources],
            torch.stack([*sources.values()]),
            [uniform(rows[index].request.seed, rows[index].position, stream=2) for index in sources],
        )
    return tokens


def _verify(tokens: Sequence[int], rows: Sequence[_Row]) -> tuple[list[int], list[int]]:
    """Return the rows up to each request's first rejected draft, and the number of accepted drafts of each request."""
    kept, accepted = [], []
    num_accepted, rejected = 0, False
    for index, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        if not rejected:
            kept.append(index)
            rejected = token != row.draft
            num_accepted += not rejected
        if row.draft is None:  # the request's last row
            accepted.append(num_accepted)
            num_accepted, rejected = 0, False
    return kept, accepted


def _copy_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


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
