"""Predicts the time of whole pieces of work from the cost of steps."""

from __future__ import annotations

from dataclasses import replace

from chairlift.core.cost_model import CostModel, StepShape, chunk_kv

_IN_FAVOUR = 0.8  # share of the prediction that counts where a request would be given up: it may be too high
_ENOUGH_STEPS = 50  # observed before any request is given up


class WorkForecast:
    """Assumes that prompts are computed in chunks of `chunk` tokens."""

    def __init__(self, cost: CostModel, chunk: int, most_per_step: int = 1) -> None:
        """`most_per_step`: new tokens that a request may get in one step, more than one with drafts."""
        assert chunk >= 1
        self._cost = cost
        self._chunk = chunk
        self._most_per_step = most_per_step

    def recompute_seconds(self, tokens: int, start: int = 0, beside: StepShape | None = None) -> float:
        """The time added to steps that run anyway by computing `tokens` tokens of one request, the first at position
        `start`; `beside`: what else those steps carry. This is the price of a preemption by recomputing."""
        base = beside or StepShape()
        whole, rest = divmod(tokens, self._chunk)
        alone = self._cost.predict(base)
        seconds = whole * (self._predict(base, self._chunk) - alone)
        if rest:
            seconds += self._predict(base, rest) - alone
        return seconds + self._kv_seconds(chunk_kv(start, tokens))

    def least_seconds(self, prompt_tokens: int, new_tokens: int) -> float:
        """The least time to compute `prompt_tokens` and then generate `new_tokens` on an idle machine; 0 while too
        little is measured to give a request up."""
        if self._cost.num_observed < _ENOUGH_STEPS:
            return 0.0
        nothing = StepShape()
        steps = -(-prompt_tokens // self._chunk)
        seconds = steps * self._cost.predict(nothing) + self.recompute_seconds(prompt_tokens)
        # The first token comes with the prompt's last step.
        decodes = -(-max(0, new_tokens - 1) // self._most_per_step)
        if decodes:
            middle = prompt_tokens + decodes // 2
            seconds += decodes * self._cost.predict(StepShape(decode_tokens=1, decode_kv=middle, requests=1))
        return _IN_FAVOUR * seconds

    def _predict(self, base: StepShape, chunk: int) -> float:
        more = base.prefill_tokens + chunk
        return self._cost.predict(replace(base, prefill_tokens=more, requests=base.requests + 1))

    def _kv_seconds(self, kv: int) -> float:
        return self._cost.predict(StepShape(prefill_kv=kv)) - self._cost.predict(StepShape())
