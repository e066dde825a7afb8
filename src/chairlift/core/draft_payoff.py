"""Whether drafts pay, by the clock: what a token took with them and without, in steps that only decode.

A cost model may be wrong about the few tokens more that drafts are. So steps with and without drafts are also compared
as they were measured, for each size of batch (in powers of two). Where drafts lose, they pause: for longer and longer,
with a short trial after each pause.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_GAIN = 0.15  # of the latest step in a mean; the first ones count equally
_ENOUGH = 6  # steps that say something
_REFRESH = 48  # steps with drafts after which one without tells whether the comparison still holds
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 2048  # steps
_OUTLIER = 3.0


@dataclass(slots=True)
class Mean:
    """Of the last few steps."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count > _ENOUGH:
            value = min(value, _OUTLIER * self.value)  # a garbage collection, a busy neighbour
        self.value += max(_GAIN, 1 / self.count) * (value - self.value)


@dataclass(slots=True)
class _Batch:
    """Steps of one size."""

    plain: Mean = field(default_factory=Mean)  # seconds per token without drafts
    drafted: Mean = field(default_factory=Mean)  # and with
    pause: int = 0  # steps without drafts left
    next_pause: int = _FIRST_PAUSE
    since_plain: int = 0

    @property
    def known(self) -> bool:
        return self.plain.count >= _ENOUGH and self.drafted.count >= _ENOUGH


class DraftPayoff:
    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self.speedup = 1.0  # estimated, of the last steps

    def allows_drafts(self, num_requests: int) -> bool:
        """Whether the next step of so many requests may have drafts."""
        batch = self._batches.setdefault(num_requests.bit_length(), _Batch())
        if batch.pause:
            batch.pause -= 1
            return False
        return batch.plain.count >= _ENOUGH and batch.since_plain < _REFRESH

    def observe(self, num_requests: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """A step that only decoded took so long."""
        batch = self._batches.setdefault(num_requests.bit_length(), _Batch())
        per_token = seconds / (num_requests + num_accepted)
        if not num_drafts:
            batch.plain.add(per_token)
            batch.since_plain = 0
            self._note_speedup(1.0)
            return
        batch.drafted.add(per_token)
        batch.since_plain += 1
        if batch.plain.count:
            self._note_speedup(batch.plain.value / per_token)
        if not batch.known:
            return
        if batch.drafted.value > batch.plain.value:
            batch.pause, batch.next_pause = batch.next_pause, min(2 * batch.next_pause, _LONGEST_PAUSE)
            batch.drafted = Mean()
        elif batch.drafted.count > 4 * _ENOUGH:
            batch.next_pause = _FIRST_PAUSE

    def _note_speedup(self, ratio: float) -> None:
        self.speedup += 0.05 * (min(ratio, 10.0) - self.speedup)
