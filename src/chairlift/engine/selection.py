"""Of the completions that are generated, those the caller hears of: all, or with beam search and `best_of` the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chairlift.core.events import Event, RequestFinished, TextProduced, TokenProduced
from chairlift.core.request import FinishReason
from chairlift.core.sampling_params import SamplingParams

_SAID = (TokenProduced, TextProduced, RequestFinished)


def scored(params: SamplingParams) -> SamplingParams:
    """As the completions are sampled: each token's log-probability is needed to compare them."""
    return params if params.logprobs is not None else params.clone(logprobs=0)


class Selection:
    """Between the engine and those who listen to it. What becomes of the other completions can be heard, but not what
    they say."""

    def __init__(self) -> None:
        self._hidden: set[str] = set()  # beams beyond the n best
        self._contests: dict[str, _Contest] = {}  # by the id of each completion: what `best_of` compares

    def open(self, ids: Sequence[str], params: SamplingParams) -> None:
        """These will be generated to choose `params.n` from."""
        if params.best_of is not None:
            self._contests.update(dict.fromkeys(ids, _Contest(list(ids), params)))
        else:
            self._hidden.update(ids[params.n :])  # a search is over for all its beams at once, the best first

    def holds(self, request_id: str) -> bool:
        """Whether something is yet to be said of it."""
        return request_id in self._contests or request_id in self._hidden

    def rivals(self, request_id: str) -> Sequence[str]:
        """The completions that `request_id` is compared with, itself included."""
        contest = self._contests.get(request_id)
        return (request_id,) if contest is None else contest.ids

    def pass_on(self, events: list[Event]) -> list[Event]:
        """What others may hear now."""
        if not self._contests and not self._hidden:
            return events
        heard: list[Event] = []
        for event in events:
            request_id = getattr(event, "request_id", "")
            if request_id in self._hidden and isinstance(event, _SAID):
                if isinstance(event, RequestFinished):
                    self._hidden.remove(request_id)
                    heard.append(event)
            elif request_id in self._contests:
                heard += self._listen(self._contests[request_id], event)
            else:
                heard.append(event)
        return heard

    def _listen(self, contest: _Contest, event: Event) -> list[Event]:
        if not isinstance(event, _SAID):
            return [event]
        contest.said[event.request_id].append(event)
        heard: list[Event] = []
        if isinstance(event, RequestFinished) and event.request_id not in contest.told:
            heard.append(event)
        if contest.over:
            for request_id in contest.ids:
                del self._contests[request_id]
            heard += contest.result()
        return heard


@dataclass(slots=True)
class _Contest:
    ids: list[str]
    params: SamplingParams
    said: dict[str, list[TokenProduced | TextProduced | RequestFinished]] = field(init=False)

    def __post_init__(self) -> None:
        self.said = {request_id: [] for request_id in self.ids}

    @property
    def told(self) -> list[str]:
        return self.ids[: self.params.n]

    @property
    def over(self) -> bool:
        return all(said and isinstance(said[-1], RequestFinished) for said in self.said.values())

    def result(self) -> list[Event]:
        """All that the best have said, under the ids that the caller knows."""
        ranked = sorted((_Entry(said) for said in self.said.values()), key=lambda entry: entry.rank)
        return [
            event
            for request_id, entry in zip(self.told, ranked, strict=False)
            for event in entry.as_said_by(request_id, keep_logprobs=self.params.logprobs is not None)
        ]


class _Entry:
    def __init__(self, said: Sequence[TokenProduced | TextProduced | RequestFinished]) -> None:
        self.said = said
        self.finished = said[-1]
        scores = [event.logprobs.logprob for event in said if isinstance(event, TokenProduced) and event.logprobs]
        self.logprob = sum(scores)
        self.mean = self.logprob / len(scores) if scores else None

    @property
    def rank(self) -> tuple[bool, float]:
        """Those that came to their own end first, the likeliest of them first of all."""
        assert isinstance(self.finished, RequestFinished)
        whole = self.finished.ending.reason in (FinishReason.STOP, FinishReason.LENGTH)
        return not whole, -self.mean if self.mean is not None else float("inf")

    def as_said_by(self, request_id: str, *, keep_logprobs: bool) -> list[Event]:
        events: list[Event] = []
        for event in self.said:
            if isinstance(event, TokenProduced) and not keep_logprobs:
                event = replace(event, logprobs=None)
            elif isinstance(event, RequestFinished):
                event = replace(event, logprob=self.logprob, score=self.mean)
            events.append(replace(event, request_id=request_id))
        return events
