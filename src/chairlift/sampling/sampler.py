"""Choosing the next token of every request of a step at once.

Per row, in this order: logprobs are read from the untouched logits; what the grammar of a structured request
allows; logit bias; tokens banned until `min_tokens`; repetition, frequency and presence penalties; then the arg
max for greedy rows, and for the others temperature, top-k, top-p, min-p and one draw.

No row's token depends on another row. A draw uses one number that is a hash of the request's seed and the index
of the token, so a seeded request gets the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from chairlift.core.logprobs import TokenLogprobs
from chairlift.core.plan import BAD_LOGITS
from chairlift.core.randomness import uniform
from chairlift.core.request import Request
from chairlift.core.sampling_params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.sampling.draw import draw, draw_or_accept, filter_weights, greedy
from chairlift.sampling.edits import Bias, Ids, TokenCounts, TokenMasks, add_bias, allow_only, ban, penalise
from chairlift.sampling.logprobs import token_logprobs

# Below this, logits divided by the temperature may overflow; the arg max is the limit and is what is meant.
COLDEST = 1e-5


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One entry per row. A token of BAD_LOGITS (-1) means that the row's logits were not usable (NaN, infinite or
    all banned): that request should end with an error; the other rows are not affected."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]  # None for rows that did not ask, or whose token is BAD_LOGITS
    accepted: list[int] = field(default_factory=list)  # of each request: how many of its drafts were right


@dataclass(frozen=True, slots=True)
class _Request:
    """What persists from step to step about one request."""

    params: SamplingParams
    seed: int
    greedy: bool
    bias: Bias | None
    banned: Ids | None  # until min_tokens are out; the mask of a structured request says so itself
    seen: TokenCounts | None  # only with penalties


@dataclass(frozen=True, slots=True)
class _Row:
    """One token to be chosen."""

    request: _Request
    output_length: int  # the index of the token
    guessed: Sequence[int] = ()  # the tokens before it that are not known to be right
    guess: int | None = None  # of the token itself; None for the last of a request
    drawn_from: Tensor | None = None  # [V]: what the guess was drawn with, if it was


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device, *, one_by_one: bool = False) -> None:
        """`one_by_one`: rows are drawn by themselves, so that no rounding depends on how many there are."""
        self.vocab_size = vocab_size
        self.device = device
        self._one_by_one = one_by_one
        self._requests: dict[str, _Request] = {}

    def follow(self, request: Request) -> None:
        """Take in a request unless it is here already."""
        if request.id not in self._requests:
            self.add(
                request.id,
                request.params,
                request.prompt,
                seed=request.seed,
                eos_ids=sorted(request.eos_ids),
                output=request.output,
            )

    def forget(self, request_id: str) -> None:
        """A request is over, whether or not it was ever here."""
        self._requests.pop(request_id, None)

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
        """Take in a request. `output` holds the tokens it has already generated, if it was preempted."""
        if request_id in self._requests:
            raise InvalidParameter("request_id", f"{request_id!r} is already in the sampler")
        check_token_ids(params, self.vocab_size)
        waits = params.min_tokens and params.structure is None
        ending = params.stop_ids if params.ignore_eos else (*params.stop_ids, *eos_ids)
        banned = sorted({token for token in ending if token < self.vocab_size})
        bias = params.logit_bias or {}
        seen = TokenCounts(params, prompt, output) if params.has_penalties else None
        if seen is not None and seen.ids.max(initial=0) >= self.vocab_size:
            raise InvalidParameter("prompt", f"token ids must be below {self.vocab_size}, got {seen.ids.max()}")
        self._requests[request_id] = _Request(
            params=params,
            seed=seed,
            greedy=params.temperature < COLDEST or params.beam_width is not None,  # nothing is drawn for beams
            bias=Bias(np.array([*bias], np.int64), np.array([*bias.values()], np.float32)) if bias else None,
            banned=np.array(banned, np.int64) if banned and waits else None,
            seen=seen,
        )

    def remove(self, request_id: str) -> None:
        """Forget a request that has finished or was preempted."""
        del self._requests[request_id]

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        output_lengths: Sequence[int],
        masks: TokenMasks | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        drawn_from: Sequence[Tensor | None] | None = None,
    ) -> SampledBatch:
        """Choose one token per row. The logits are used up: they are changed in place.

        logits: [S, V] float32, contiguous. output_lengths[i]: how many tokens the request has generated so
        far, which is the index of the token chosen now. masks: what the rows of structured requests may get.

        drafts[i]: guesses of the request's next tokens. It then has a row for its next token and one for the token
        after each guess. Every row's token is chosen as if the guesses before it were the request's own; those up to
        and including the first that differs from its guess are what the request would have got without any.

        drawn_from[i] [drafts, V]: the probabilities that those guesses were drawn with, if they were drawn. Then they
        are kept as often as they can be while every token is distributed as it would have been without any.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        rows = _rows(requests, output_lengths, drafts, drawn_from)
        assert logits.shape == (len(rows), self.vocab_size)
        assert logits.device.type == self.device.type
        if not rows:  # a step of nothing but unfinished prefills
            return SampledBatch([], [])
        asking = [row for row, one in enumerate(rows) if one.request.params.logprobs is not None]
        raw = _copy_rows(logits, asking) if asking else None  # what follows changes the logits

        if masks is not None:
            allow_only(logits, masks)
        self._edit(logits, rows)
        tokens = self._choose(logits, rows)
        kept, accepted = _verify(tokens, rows)
        for row in kept:
            seen = rows[row].request.seen
            if seen is not None and tokens[row] != BAD_LOGITS:
                seen.add(tokens[row])

        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if raw is not None:
            found = token_logprobs(
                raw,
                [max(tokens[row], 0) for row in asking],
                [rows[row].request.params.logprobs or 0 for row in asking],
                one_by_one=self._one_by_one,
            )
            for row, entry in zip(asking, found, strict=True):
                logprobs[row] = entry if tokens[row] != BAD_LOGITS else None
        return SampledBatch([tokens[row] for row in kept], [logprobs[row] for row in kept], accepted)

    def _edit(self, logits: Tensor, rows: Sequence[_Row]) -> None:
        biased = [(row, r.request.bias) for row, r in enumerate(rows) if r.request.bias is not None]
        if biased:
            add_bias(logits, biased)
        banned = [
            (row, r.request.banned)
            for row, r in enumerate(rows)
            if r.request.banned is not None and r.output_length < r.request.params.min_tokens
        ]
        if banned:
            ban(logits, banned)
        penalised = [(row, r.request.seen.after(r.guessed)) for row, r in enumerate(rows) if r.request.seen]
        if penalised:
            penalise(logits, penalised)

    def _choose(self, logits: Tensor, all_rows: Sequence[_Row]) -> list[int]:
        rows = [row for row, one in enumerate(all_rows) if not one.request.greedy]
        if len(rows) == len(all_rows) and not self._one_by_one:
            tokens = _draw(logits, all_rows)
        else:
            tokens = greedy(logits)  # of every row: cheaper than picking the greedy ones out
            # A copy begins where memory is aligned: on a GPU the order of a sum depends on that too.
            for group in filter(None, [[row] for row in rows] if self._one_by_one else [rows]):
                tokens[group] = _draw(_copy_rows(logits, group), [all_rows[row] for row in group])
        chosen: list[int] = tokens.tolist()
        return chosen


def _rows(
    requests: Sequence[_Request],
    output_lengths: Sequence[int],
    drafts: Sequence[Sequence[int]] | None,
    drawn_from: Sequence[Tensor | None] | None,
) -> list[_Row]:
    if drafts is None:
        return [_Row(request, length) for request, length in zip(requests, output_lengths, strict=True)]
    rows = []
    sources = drawn_from or [None] * len(requests)
    for request, length, guesses, source in zip(requests, output_lengths, drafts, sources, strict=True):
        known = None if request.greedy else source
        rows += [
            _Row(request, length + i, guesses[:i], guess, None if known is None else known[i])
            for i, guess in enumerate(guesses)
        ]
        rows.append(_Row(request, length + len(guesses), guesses))
    return rows


def _verify(tokens: Sequence[int], rows: Sequence[_Row]) -> tuple[list[int], list[int]]:
    """The rows whose tokens count: of each request, up to the first wrong guess. And how many guesses were right."""
    kept, accepted = [], []
    right, wrong = 0, False
    for row, (token, one) in enumerate(zip(tokens, rows, strict=True)):
        if not wrong:
            kept.append(row)
            wrong = token != one.guess
            right += not wrong
        if one.guess is None:  # its last row
            accepted.append(right)
            right, wrong = 0, False
    return kept, accepted


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have. Call it before a request is queued."""
    named = {"logit_bias": params.logit_bias or (), "stop_token_ids": params.stop_ids}
    for name, ids in named.items():
        worst = max(ids, default=0)
        if worst >= vocab_size:
            raise InvalidParameter(name, f"token ids must be below {vocab_size}, got {worst}")


def _draw(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """One random token per row [R] of logits [R, V], which are changed in place."""
    params = [row.request.params for row in rows]
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device)
    weights = logits.div_(temperatures[:, None]).softmax(dim=-1)
    filter_weights(weights, params)
    uniforms = [uniform(row.request.seed, row.output_length) for row in rows]
    tokens = draw(weights, uniforms)
    guessed = {place: row.drawn_from for place, row in enumerate(rows) if row.drawn_from is not None}
    if guessed:
        tokens[[*guessed]] = draw_or_accept(
            _copy_rows(weights, [*guessed]),
            [uniforms[place] for place in guessed],
            [rows[place].guess or 0 for place in guessed],
            torch.stack([*guessed.values()]),
            [uniform(rows[place].request.seed, rows[place].output_length, stream=2) for place in guessed],
        )
    return tokens


def _copy_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits.index_select(0, torch.tensor(rows, device=logits.device))
