"""Collects results from the engine's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chairlift.core.events import (
    Event,
    PromptPooled,
    PromptScored,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TextProduced,
    TokenProduced,
)
from chairlift.core.sampling.logprobs import TokenLogprobs
from chairlift.core.sampling.params import SamplingParams
from chairlift.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamedText
from chairlift.prompt_input import PromptInput

if TYPE_CHECKING:
    from chairlift.text.tokenizer import Tokenizer


class ResultCollector:
    """Collects the results of one call from the engine's events."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.results: list[RequestOutput] = []
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._places: dict[str, tuple[int, int]] = {}  # request id -> (prompt, completion)
        self._open: dict[str, None] = {}
        self._changed: dict[str, None] = {}  # requests with output since the last call of pieces()
        self._returned: dict[str, tuple[int, int]] = {}  # characters and tokens that pieces() has returned

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_new_output(self) -> bool:
        return bool(self._changed)

    def open_ids(self) -> list[str]:
        return list(self._open)

    def add(self, ids: Sequence[str], prompt: PromptInput, params: SamplingParams, now: float) -> None:
        with_logprobs = params.logprobs is not None
        completions = [
            CompletionOutput(
                index, logprobs=[] if with_logprobs else None, cumulative_logprob=0.0 if with_logprobs else None
            )
            for index in range(len(ids))
        ]
        for index, request_id in enumerate(ids):
            self._places[request_id] = (len(self.results), index)
            self._open[request_id] = None
        result = RequestOutput(ids[0], prompt.text, prompt.token_ids, completions, RequestMetrics(arrival=now))
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None]  # nothing comes before the first token
        self.results.append(result)

    def add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            request_id = getattr(event, "request_id", "")
            if request_id in self._open:
                prompt, index = self._places[request_id]
                self._apply(event, self.results[prompt], self.results[prompt].outputs[index])

    def _apply(self, event: Event, result: RequestOutput, completion: CompletionOutput) -> None:
        first = completion.index == 0  # a result has the metrics of its first completion
        match event:
            case RequestAdmitted() if first and result.metrics.boarded is None:
                result.metrics.boarded = event.time
                result.cached_tokens = event.cached_tokens
            case RequestPreempted():
                result.metrics.preemptions += 1
            case PromptScored():
                assert result.prompt_logprobs is not None
                result.prompt_logprobs += [self._entry(found) for found in event.logprobs]
            case PromptPooled():
                result.vector = list(event.vector)
            case TokenProduced():
                self.num_tokens += 1
                self._changed[event.request_id] = None
                completion.token_ids.append(event.token)
                self._add_logprobs(completion, event.logprobs)
                if first:
                    result.metrics.token_times.append(event.time)
            case TextProduced():
                completion.text += event.text
            case RequestFinished():
                completion.finish_reason = event.ending.reason.value
                completion.stop_reason = event.ending.detail
                completion.score = event.score
                if event.logprob is not None:
                    completion.cumulative_logprob = event.logprob
                result.metrics.finished = event.time
                self._changed[event.request_id] = None
                del self._open[event.request_id]
            case _:
                pass

    def _add_logprobs(self, completion: CompletionOutput, found: TokenLogprobs | None) -> None:
        if found is None or completion.logprobs is None or completion.cumulative_logprob is None:
            return
        completion.cumulative_logprob += found.logprob
        completion.logprobs.append(self._entry(found))

    def _entry(self, found: TokenLogprobs) -> dict[int, Logprob]:
        entries = {token: (value, rank) for rank, (token, value) in enumerate(found.top, start=1)}
        entries[found.token_id] = (found.logprob, found.rank)
        return {
            token: Logprob(value, rank, self._tokenizer.decode([token], skip_special_tokens=False))
            for token, (value, rank) in entries.items()
        }

    def pieces(self) -> list[StreamedText]:
        """Return the output since the last call: one piece for each completion with new output."""
        changed, self._changed = self._changed, {}
        return [self._piece(request_id) for request_id in changed]

    def _piece(self, request_id: str) -> StreamedText:
        prompt, index = self._places[request_id]
        completion = self.results[prompt].outputs[index]
        characters, tokens = self._returned.get(request_id, (0, 0))
        self._returned[request_id] = len(completion.text), len(completion.token_ids)
        text, token_ids = completion.text[characters:], completion.token_ids[tokens:]
        return StreamedText(prompt, index, text, token_ids, completion.finish_reason)
