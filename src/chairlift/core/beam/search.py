"""Beam search for one prompt, as in transformers' `generate(num_beams=…)`; independent of memory and scheduler.

In every step, each beam has candidates for its next token. Continuations of all beams are ranked by the sum of their
log-probabilities. Those that end (a stop token, or the last token allowed) become hypotheses if they are among the
`beam_width` best; the `beam_width` best of the others are the beams of the next step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from chairlift.core.request import Ending, FinishReason
from chairlift.core.sampling.logprobs import TokenLogprobs
from chairlift.core.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of one beam, likeliest first, with their log-probabilities."""

    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Beam:
    """A token and its parent beam; beams with a common prefix share it."""

    parent: Beam | None  # None for the root, which is the prompt
    token: int
    total: float  # sum of the log-probabilities of all its tokens
    length: int
    scored: TokenLogprobs | None = None  # if logprobs are requested

    def path(self) -> list[Beam]:
        """The beams from the first generated token to this one."""
        return list(self._ancestors())[::-1]

    def _ancestors(self) -> Iterator[Beam]:
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            yield beam
            beam = beam.parent


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended."""

    beam: Beam
    score: float  # total / length ** length_penalty
    ending: Ending


class BeamSearch:
    """The beams of one prompt and the hypotheses found so far."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], max_new_tokens: int) -> None:
        assert params.beam_width is not None
        self.width = params.beam_width
        self.beams = [Beam(parent=None, token=-1, total=0.0, length=0)]  # best first
        self.finished: list[Hypothesis] = []  # best first, at most `width`
        self.over = False
        self._params = params
        self._max_new_tokens = max_new_tokens
        self._end_ids = end_ids(params, eos_ids)
        # Enough that `width` of them continue even if every beam can end with each of the stop tokens.
        self._num_compared = max(2, 1 + len(self._end_ids)) * self.width

    @property
    def num_candidates(self) -> int:
        """The number of candidates that each beam needs."""
        # Stop tokens that min_tokens does not allow yet are skipped, so more candidates are needed.
        return max(self._num_compared + (len(self._end_ids) if self._too_short else 0), self._params.logprobs or 0)

    @property
    def _too_short(self) -> bool:
        """Whether ending with the next token would violate `min_tokens`."""
        return self.beams[0].length < self._params.min_tokens

    def advance(self, found: Sequence[Candidates]) -> list[int]:
        """Advance all beams by one token, given their candidates; return the index of the parent of each new beam."""
        compared = nlargest(self._num_compared, self._continuations(found), key=lambda entry: entry[0])
        continuing: list[tuple[int, Beam]] = []
        for place, (total, index, at) in enumerate(compared):
            parent, token = self.beams[index], found[index].ids[at]
            ending = self._ending(token, parent.length + 1)
            if ending is None and len(continuing) < self.width:
                continuing.append((index, self._grow(parent, found[index], at, total)))
            elif ending is not None and place < self.width:
                beam = self._grow(parent, found[index], at, total)
                self.finished.append(Hypothesis(beam, self._score(total, beam.length), ending))
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.width]
        self.beams = [beam for _, beam in continuing]
        self.over = not self.beams or not self._worth_continuing()
        return [index for index, _ in continuing]

    def _continuations(self, found: Sequence[Candidates]) -> Iterator[tuple[float, int, int]]:
        """Yield (total, beam index, candidate index) of every allowed continuation."""
        banned = self._end_ids if self._too_short else frozenset[int]()
        for index, (beam, candidates) in enumerate(zip(self.beams, found, strict=True)):
            for at, (token, logprob) in enumerate(zip(candidates.ids, candidates.logprobs, strict=True)):
                if token not in banned:
                    yield beam.total + logprob, index, at

    def _grow(self, parent: Beam, candidates: Candidates, at: int, total: float) -> Beam:
        token, scored = candidates.ids[at], None
        if self._params.logprobs is not None:
            logprob = candidates.logprobs[at]
            rank = 1 + bisect_left(candidates.logprobs, -logprob, key=lambda value: -value)
            top = tuple(zip(candidates.ids, candidates.logprobs, strict=True))[: self._params.logprobs]
            scored = TokenLogprobs(token, logprob, rank, top)
        return Beam(parent, token, total, parent.length + 1, scored)

    def _ending(self, token: int, length: int) -> Ending | None:
        if token in self._end_ids:
            return Ending(FinishReason.STOP, token if token in self._params.stop_ids else None)
        return Ending(FinishReason.LENGTH) if length >= self._max_new_tokens else None

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._params.length_penalty)

    def _worth_continuing(self) -> bool:
        """Whether a beam may still beat the worst hypothesis, by the rule of `early_stopping`."""
        if len(self.finished) < self.width:
            return True
        early, best = self._params.early_stopping, self.beams[0]
        if early is True:
            return False
        longest = early == "never" and self._params.length_penalty > 0.0
        length = self._max_new_tokens if longest else best.length
        return self._score(best.total, length) > self.finished[-1].score


def end_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a beam."""
    return frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else eos_ids)
