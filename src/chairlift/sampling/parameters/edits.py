"""The sampling parameters that edit logits: logit_bias, min_tokens and the three penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.sampling.parameters.base import EditedRow, Ids, LogitsEdit, SampledRequest, Values, flat_index


@SAMPLING_PARAMETERS.register("logit_bias")
class LogitBias(LogitsEdit):
    """Adds a number to the logits of some tokens."""

    order = 10

    def __init__(self, request: SampledRequest) -> None:
        bias = request.params.logit_bias or {}
        self._ids: Ids = np.array([*bias], np.int64)
        self._values: Values = np.array([*bias.values()], np.float32)

    @classmethod
    def edit_rows(cls, logits: Tensor, rows: Sequence[EditedRow[LogitBias]]) -> None:
        index = flat_index(logits, ((row.index, row.edit._ids) for row in rows))
        values = np.concatenate([row.edit._values for row in rows])
        logits.view(-1).index_add_(0, index, torch.from_numpy(values).to(logits.device))


@SAMPLING_PARAMETERS.register("min_tokens")
class MinTokens(LogitsEdit):
    """Bans the tokens that end the output until it has this length."""

    order = 20

    def __init__(self, request: SampledRequest) -> None:
        params = request.params
        ending = params.stop_ids if params.ignore_eos else (*params.stop_ids, *request.eos_ids)
        banned = sorted({token for token in ending if token < request.vocab_size})
        self._banned: Ids = np.array(banned, np.int64)
        # Structured requests get this from their mask, which still allows an end where the grammar allows nothing else.
        self._until = params.min_tokens if banned and params.structure is None else 0

    def applies(self, position: int) -> bool:
        return position < self._until

    @classmethod
    def edit_rows(cls, logits: Tensor, rows: Sequence[EditedRow[MinTokens]]) -> None:
        index = flat_index(logits, ((row.index, row.edit._banned) for row in rows))
        logits.view(-1).index_fill_(0, index, -torch.inf)


@SAMPLING_PARAMETERS.register("penalties")
class Penalties(LogitsEdit):
    """Makes tokens that occurred less likely: repetition divides a positive logit and multiplies a negative one;
    frequency then subtracts in proportion to the count, and presence once.

    The three share one count of tokens. Penalties affect hundreds of tokens of a much larger vocabulary, so the state
    is a list of token ids on the host, and an edit is one gather and one scatter for the whole batch.
    """

    order = 30

    def __init__(self, request: SampledRequest) -> None:
        params = request.params
        self._factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._counts = TokenCounts(params, request.prompt, request.output)
        highest = int(self._counts.ids.max(initial=0))
        if highest >= request.vocab_size:
            raise InvalidParameter("prompt", f"token ids must be below {request.vocab_size}, got {highest}")

    def observe(self, token: int) -> None:
        self._counts.add(token)

    @classmethod
    def edit_rows(cls, logits: Tensor, rows: Sequence[EditedRow[Penalties]]) -> None:
        seen = [row.edit._counts.after(row.drafts) for row in rows]
        index = flat_index(logits, ((row.index, tokens.ids) for row, tokens in zip(rows, seen, strict=True)))
        counts = torch.from_numpy(np.concatenate([tokens.counts for tokens in seen])).to(logits.device)
        factors = np.array([row.edit._factors for row in rows], dtype=np.float32)
        per_token = np.repeat(factors, [len(tokens.ids) for tokens in seen], axis=0).T.copy()
        repetition, frequency, presence = torch.from_numpy(per_token).to(logits.device)

        flat = logits.view(-1)
        values = flat[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts + presence * (counts > 0)
        flat[index] = values


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The tokens that the penalties of one row apply to. Read-only: the arrays may be shared with a TokenCounts."""

    ids: Ids
    counts: Values


class TokenCounts:
    """The tokens that a request's penalties apply to, and how often each was generated.

    Tokens of the prompt are listed (with count 0) only for the repetition penalty: the other two apply to the output
    alone.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        listed = dict.fromkeys(prompt) if params.repetition_penalty != 1.0 else {}
        self._index = {token: index for index, token in enumerate(listed)}
        self._ids: Ids = np.fromiter(listed, dtype=np.int64, count=len(listed))
        self._counts: Values = np.zeros(len(listed), dtype=np.float32)
        for token in output:
            self.add(token)

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> Values:
        return self._counts[: len(self._index)]

    def after(self, drafts: Sequence[int]) -> SeenTokens:
        """Return the state after these draft tokens. Only the counts are copied."""
        if not drafts:
            return SeenTokens(self.ids, self.counts)
        new = [token for token in dict.fromkeys(drafts) if token not in self._index]
        ids = np.concatenate([self.ids, np.array(new, dtype=np.int64)]) if new else self.ids
        counts = np.concatenate([self.counts, np.zeros(len(new), dtype=np.float32)])
        for token in drafts:
            index = self._index.get(token)
            counts[len(self._index) + new.index(token) if index is None else index] += 1
        return SeenTokens(ids, counts)

    def add(self, token: int) -> None:
        """Count one generated token."""
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            room = max(16, index)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[index] = token
        self._counts[index] += 1
