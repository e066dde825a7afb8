"""Prompt outputs: log-probabilities of prompt tokens, and vectors pooled from the hidden states of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from chairlift.core.plan import NO_PROMPT_OUTPUTS, Chunk, PromptOutputs, TokenLogprobs
from chairlift.core.sampling.pooling import PoolingKind
from chairlift.models.base import CausalLM
from chairlift.sampling.logprobs import token_logprobs

SCORED_AT_ONCE = 128  # rows whose logits are in memory at the same time; a vocabulary is large


@dataclass(slots=True)
class _Sum:
    """The sum of the hidden states of a prompt so far."""

    total: Tensor  # [hidden] float32
    end: int = 0  # the position after the last one added


class PromptReader:
    """Computes the prompt outputs of a step from the hidden states that its chunks read."""

    def __init__(self, model: CausalLM, *, one_by_one: bool) -> None:
        self._model = model
        self._one_by_one = one_by_one
        self._sums: dict[str, _Sum] = {}  # of prompts that are not complete

    def read(self, chunks: Sequence[Chunk], hidden: Tensor) -> PromptOutputs:
        """hidden [R, hidden]: the rows of the positions `chunk.read` of all chunks, in their order."""
        reading = [chunk for chunk in chunks if chunk.read]
        if not reading:
            return NO_PROMPT_OUTPUTS
        rows = hidden.split([len(chunk.read) for chunk in reading])
        scored = [(chunk, own) for chunk, own in zip(reading, rows, strict=True) if chunk.request.scores_prompt]
        pooled = [(chunk, own) for chunk, own in zip(reading, rows, strict=True) if not chunk.request.scores_prompt]
        vectors = {chunk.request.id: self._pool(chunk, own) for chunk, own in pooled}
        return PromptOutputs(
            self._score(scored),
            {one: array("f", vector.tolist()) for one, vector in vectors.items() if vector is not None},
        )

    def forget(self, request_id: str) -> None:
        self._sums.pop(request_id, None)

    def _score(self, scored: Sequence[tuple[Chunk, Tensor]]) -> dict[str, list[TokenLogprobs]]:
        """The log-probabilities of the tokens after each position, by request id."""
        tokens, counts = list[int](), list[int]()
        for chunk, rows in scored:
            tokens += chunk.request.tokens[chunk.read.start + 1 : chunk.read.stop + 1]
            counts += [chunk.request.params.prompt_logprobs or 0] * len(rows)
        hidden = torch.cat([rows for _, rows in scored]) if scored else None
        found: list[TokenLogprobs] = []
        while hidden is not None and len(found) < len(tokens):
            part = slice(len(found), len(found) + SCORED_AT_ONCE)
            logits = self._model.logits(hidden[part]).float()
            found += token_logprobs(logits, tokens[part], counts[part], one_by_one=self._one_by_one)
        in_order = iter(found)
        return {chunk.request.id: list(islice(in_order, len(rows))) for chunk, rows in scored}

    def _pool(self, chunk: Chunk, rows: Tensor) -> Tensor | None:
        """The vector of a prompt that this chunk completes; None before that."""
        pooling = chunk.request.params.pooling
        assert pooling is not None
        pooled = self._add(chunk, rows) / chunk.end if pooling.kind is PoolingKind.MEAN else rows[-1].float()
        if chunk.end < chunk.request.num_prompt:
            return None
        if pooling.token_ids:
            return self._model.logits(rows[-1:])[0, list(pooling.token_ids)].float()
        pooled = pooled[: pooling.dimensions]
        return torch.nn.functional.normalize(pooled, dim=0) if pooling.normalize else pooled

    def _add(self, chunk: Chunk, rows: Tensor) -> Tensor:
        """Add the hidden states of a chunk, except those that a step before a preemption has added."""
        known = self._sums.get(chunk.request.id)
        if known is None:
            known = self._sums[chunk.request.id] = _Sum(rows.new_zeros(rows.shape[1], dtype=torch.float32))
        assert chunk.read.start <= known.end
        new = rows[known.end - chunk.read.start :]
        if len(new):
            known.total += new.float().sum(dim=0)
            known.end = chunk.read.stop
        return known.total
