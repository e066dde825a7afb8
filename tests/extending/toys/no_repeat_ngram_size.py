"""no_repeat_ngram_size: no sequence of this many tokens occurs twice in a prompt and its output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS, SamplingParameter, Stage, integer
from chairlift.sampling.parameters.base import LogitsEdit, SampledRequest


@SAMPLING_PARAMETERS.register("no_repeat_ngram_size")
class NoRepeatNgramSize(LogitsEdit):
    declaration = SamplingParameter(neutral=0, check=integer(0, 16), stage=Stage.LOGITS)

    def __init__(self, request: SampledRequest) -> None:
        self._size = request.params.value("no_repeat_ngram_size")
        self._tokens = [*request.prompt, *request.output]

    def observe(self, token: int) -> None:
        self._tokens.append(token)

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        tokens = [*self._tokens, *drafts]
        start = len(tokens) - self._size + 1
        banned = [
            tokens[first + self._size - 1]
            for first in range(start)
            if tokens[first : first + self._size - 1] == tokens[start:]
        ]
        logits[banned] = -torch.inf
