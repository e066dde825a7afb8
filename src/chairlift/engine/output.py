"""The output of requests: the text of their tokens, and which of the generated completions a caller gets (all, or with
beam search and `best_of` the best)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chairlift.core.events import Event, RequestFinished, TextProduced, TokenProduced
from chairlift.core.request import FinishReason, Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.text.stop_strings import StopStrings
from chairlift.text.tokenizer import Tokenizer


class OutputText:
    """The text of one request."""

    def __init__(self, tokenizer: Tokenizer, request: Request, end_strings: Sequence[str] = ()) -> None:
        """`end_strings` are stop strings of the model, which `ignore_eos` turns off."""
        params = request.params
        self._detokenizer = tokenizer.detokenizer(
            params.skip_special_tokens,
            params.visible_special_ids or (),
            verbatim=params.structure is not None,  # the caller gets exactly the text that the grammar matched
        )
        self._asked_for = params.stop_strings
        ends = () if params.ignore_eos or params.beam_width is not None else end_strings
        self._stops = StopStrings([*dict.fromkeys((*self._asked_for, *ends))], params.include_stop_str_in_output)
        self._ready: list[str] = []
        self._stopped = False
        self._min_tokens = params.min_tokens
        # The token that ends a text is not part of it, unless the request asks for it.
        self._hidden_tokens = frozenset() if params.include_stop_str_in_output else request.stop_tokens

    def push(self, request: Request, token: int) -> str | None:
        """Add a token just appended to `request`; return the stop string that it completes, if any: the request's, or
        an empty one for the model's."""
        if token in self._hidden_tokens:
            return None
        text = self._detokenizer.push(token)
        if request.num_output < self._min_tokens:
            self._ready.append(text)  # too early to stop
            return None
        emitted, matched = self._stops.push(text)
        self._ready.append(emitted)
        self._stopped = matched is not None
        return "" if matched is not None and matched not in self._asked_for else matched

    def take(self) -> str:
        """The text since the last call that cannot become part of a stop string."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def close(self) -> str:
        """The rest of the text, once the request has finished."""
        if not self._stopped:
            emitted, _ = self._stops.push(self._detokenizer.flush())
            self._ready += [emitted, self._stops.flush()]
        return self.take()


Output = TokenProduced | TextProduced | RequestFinished
_OUTPUT = (TokenProduced, TextProduced, RequestFinished)


def with_logprobs(params: SamplingParams) -> SamplingParams:
    """The same with the log-probability of each token, by which completions are compared."""
    return params if params.logprobs is not None else params.clone(logprobs=0)


class CompletionSelection:
    """Filters events before they are published.

    Output events of completions that are not among the best are removed; all other events, and all endings, pass.
    """

    def __init__(self) -> None:
        self._hidden: set[str] = set()  # beams beyond the n best
        self._comparisons: dict[str, _Comparison] = {}  # The keys are ids of the completions that `best_of` compares.

    def open(self, ids: Sequence[str], params: SamplingParams) -> None:
        """Note the completions of a new request, of which `params.n` are to be published."""
        if params.best_of is not None:
            self._comparisons.update(dict.fromkeys(ids, _Comparison(list(ids), params)))
        else:
            self._hidden.update(ids[params.n :])  # all beams of a search end at once, the best first

    def holds(self, request_id: str) -> bool:
        """Whether events of this completion are still to be published."""
        return request_id in self._comparisons or request_id in self._hidden

    def compared_with(self, request_id: str) -> Sequence[str]:
        """The completions that `request_id` is compared with, itself included."""
        comparison = self._comparisons.get(request_id)
        return (request_id,) if comparison is None else comparison.ids

    def filter(self, events: list[Event]) -> list[Event]:
        """The events that can be published now."""
        if not self._comparisons and not self._hidden:
            return events
        published: list[Event] = []
        for event in events:
            request_id = getattr(event, "request_id", "")
            if request_id in self._hidden and isinstance(event, _OUTPUT):
                if isinstance(event, RequestFinished):
                    self._hidden.remove(request_id)
                    published.append(event)
            elif request_id in self._comparisons:
                published += self._compare(self._comparisons[request_id], event)
            else:
                published.append(event)
        return published

    def _compare(self, comparison: _Comparison, event: Event) -> list[Event]:
        if not isinstance(event, _OUTPUT):
            return [event]
        comparison.outputs[event.request_id].append(event)
        published: list[Event] = []
        if isinstance(event, RequestFinished) and event.request_id not in comparison.published_ids:
            published.append(event)
        if comparison.over:
            for request_id in comparison.ids:
                del self._comparisons[request_id]
            published += comparison.best()
        return published


@dataclass(slots=True)
class _Comparison:
    """The completions of one request with `best_of`, whose output is kept until all are finished."""

    ids: list[str]
    params: SamplingParams
    outputs: dict[str, list[Output]] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = {request_id: [] for request_id in self.ids}

    @property
    def published_ids(self) -> list[str]:
        return self.ids[: self.params.n]

    @property
    def over(self) -> bool:
        return all(output and isinstance(output[-1], RequestFinished) for output in self.outputs.values())

    def best(self) -> list[Event]:
        """The output of the best completions, under the ids that the caller knows."""
        ranked = sorted((_Completion(output) for output in self.outputs.values()), key=lambda one: one.rank)
        return [
            event
            for request_id, completion in zip(self.published_ids, ranked, strict=False)
            for event in completion.renamed(request_id, keep_logprobs=self.params.logprobs is not None)
        ]


class _Completion:
    def __init__(self, output: Sequence[Output]) -> None:
        self.output = output
        self.finished = output[-1]
        scores = [event.logprobs.logprob for event in output if isinstance(event, TokenProduced) and event.logprobs]
        self.logprob = sum(scores)
        self.mean = self.logprob / len(scores) if scores else None

    @property
    def rank(self) -> tuple[bool, float]:
        """Completions that ended by themselves come first; among those, the likeliest."""
        assert isinstance(self.finished, RequestFinished)
        complete = self.finished.ending.reason in (FinishReason.STOP, FinishReason.LENGTH)
        return not complete, -self.mean if self.mean is not None else float("inf")

    def renamed(self, request_id: str, *, keep_logprobs: bool) -> list[Event]:
        events: list[Event] = []
        for event in self.output:
            if isinstance(event, TokenProduced) and not keep_logprobs:
                event = replace(event, logprobs=None)
            elif isinstance(event, RequestFinished):
                event = replace(event, logprob=self.logprob, score=self.mean)
            events.append(replace(event, request_id=request_id))
        return events
