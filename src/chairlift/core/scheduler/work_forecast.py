"""Predicts the time of several steps from the cost model."""

from __future__ import annotations

from dataclasses import replace

from chairlift.core.cost_model import CostModel, StepShape, chunk_kv

_SAFETY_FACTOR = 0.8  # share of the prediction that counts before a request is dropped, since it may be too high
_MIN_STEPS = 50  # observed before any request is dropped


class WorkForecast:
    """Predicts the time of prompts and completions, with prompts in chunks of `chunk` tokens."""

    def __init__(self, cost: CostModel, chunk: int, most_per_step: int = 1) -> None:
        """`most_per_step`: the most new tokens of a request in one step, more than one with drafts."""
        assert chunk >= 1
        self._cost = cost
        self._chunk = chunk
        self._most_per_step = most_per_step

    def recompute_seconds(self, tokens: int, start: int = 0, beside: StepShape | None = None) -> float:
        """The time that computing `tokens` tokens of one request, from position `start` on, adds to steps that run
        anyway; `beside` is the other work of those steps. This is the cost of preemption by recomputation."""
        base = beside or StepShape()
        whole, rest = divmod(tokens, self._chunk)
        alone = self._cost.predict(base)
        seconds = whole * (self._predict(base, self._chunk) - alone)
        if rest:
            seconds += self._predict(base, rest) - alone
        return seconds + self._kv_seconds(chunk_kv(start, tokens))

    def least_seconds(self, prompt_tokens: int, new_tokens: int) -> float:
        """A lower bound on the time to compute `prompt_tokens` and generate `new_tokens` in an empty batch; 0 before
        enough steps are measured."""
        if self._cost.num_observed < _MIN_STEPS:
            return 0.0
        nothing = StepShape()
        steps = -(-prompt_tokens // self._chunk)
        seconds = steps * self._cost.predict(nothing) + self.recompute_seconds(prompt_tokens)
        # The last step of the prompt samples the first token.
        decodes = -(-max(0, new_tokens - 1) // self._most_per_step)
        if decodes:
            middle = prompt_tokens + decodes // 2
            seconds += decodes * self._cost.predict(StepShape(decode_tokens=1, decode_kv=middle, requests=1))
        return _SAFETY_FACTOR * seconds

    def _predict(self, base: StepShape, chunk: int) -> float:
        more = base.prefill_tokens + chunk
        return self._cost.predict(replace(base, prefill_tokens=more, requests=base.requests + 1))

    def _kv_seconds(self, kv: int) -> float:
        return self._cost.predict(StepShape(prefill_kv=kv)) - self._cost.predict(StepShape())
