"""Whether drafts pay, by the clock: what a token took with them and without, in steps that only decode.

A cost model may be wrong about the few tokens more that drafts are. So steps with and without drafts are also compared
as they were measured, for each size of batch (in powers of two). Where drafts lose, they pause: for longer and longer,
with a short trial after each pause.

In a long pause a draft head sleeps: what is generated meanwhile is not shown to it. It wakes some steps before the
pause ends, for who has seen nothing of an answer guesses badly, and would be judged by that. Other sizes of batch may
have drafts at the same time: the head does not fall asleep for a few steps of a size that pauses, and once it has,
nobody gets drafts before it has been awake for some steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_GAIN = 0.15  # of the latest step in a mean; the first ones count equally
_ENOUGH = 6  # steps that say something
_MANY, _ENOUGH_OF_MANY = 8, 2  # requests, whose steps are long and full of them: so few say as much
# How many guesses of a request are right is luck from step to step, which evens out over the requests of a batch or,
# where those are few, over more steps. So one request alone is judged by more steps than many are.
_GAIN_PER_REQUEST = 0.03
_ENOUGH_REQUESTS = 48  # requests times steps
_CLEAR_LOSS = 1.25  # nobody waits for more steps if drafts are that bad
_REFRESH = 48  # steps with drafts after which one without tells whether the comparison still holds
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 2048  # steps
_FIRST_PAUSE_OF_MANY = 512  # a trial of many costs as much as two to four steps, and its verdict is hardly luck
_WAKING = 16  # the last steps of a pause
_OUTLIER = 3.0
_WORTHWHILE = 0.97  # drafts that save less are not worth what trying them costs
# Steps of many were measured without drafts when their contexts were longer or shorter: less may only seem to be saved.
_WORTHWHILE_OF_MANY = 0.92
_SLOPE_OUTLIER = 1.5  # drafts add little to a step: a slope is made of small differences
_FORGIVING = 0.995
_TELLING = 0.25  # a deviation of so much of the mean makes a slope


@dataclass(slots=True)
class Pace:
    """Seconds per token of the last few steps: all their time by all their tokens, for steps differ in how many."""

    seconds: float = 0.0  # per step
    tokens: float = 0.0  # per step
    count: int = 0

    def add(self, seconds: float, tokens: int, gain: float = _GAIN) -> None:
        self.count += 1
        if self.count > _ENOUGH:
            seconds = min(seconds, _OUTLIER * self.seconds)  # a garbage collection, a busy neighbour
        gain = max(gain, 1 / self.count)
        self.seconds += gain * (seconds - self.seconds)
        self.tokens += gain * (tokens - self.tokens)

    @property
    def value(self) -> float:
        return self.seconds / self.tokens


@dataclass(slots=True)
class DraftSlope:
    """What one more draft adds to what has some: the slope of a line through such steps. What those take longer for
    having any drafts at all is no part of it."""

    value: float | None = None  # seconds; None as long as steps differ too little to tell
    count: int = 0
    drafts: float = 0.0  # per step
    seconds: float = 0.0
    _spread: float = 0.0  # mean of (drafts - their mean)²
    _together: float = 0.0  # and of that times (seconds - their mean)

    def add(self, drafts: int, seconds: float) -> None:
        self.count += 1
        if self.count > _ENOUGH:
            seconds = min(seconds, _SLOPE_OUTLIER * self.seconds)
        gain = max(_GAIN, 1 / self.count)
        more_drafts, more_seconds = drafts - self.drafts, seconds - self.seconds
        self.drafts += gain * more_drafts
        self.seconds += gain * more_seconds
        self._spread = (1 - gain) * (self._spread + gain * more_drafts**2)
        self._together = (1 - gain) * (self._together + gain * more_drafts * more_seconds)
        if self.count >= _ENOUGH and self._spread > (_TELLING * self.drafts) ** 2:
            self.value = max(0.0, self._together / self._spread)

    def forgive(self, steps: int = 1) -> None:
        """Steps without drafts that might have had some: they may not be chosen because of what is said here, and it
        may be wrong."""
        if self.value is not None:
            self.value *= _FORGIVING**steps


@dataclass(slots=True)
class _Batch:
    """Steps of one size."""

    plain: Pace = field(default_factory=Pace)  # without drafts
    drafted: Pace = field(default_factory=Pace)
    slope: DraftSlope = field(default_factory=DraftSlope)
    pause: int = 0  # steps without drafts left
    next_pause: int = _FIRST_PAUSE
    since_plain: int = 0
    plain_is_new: bool = False  # measured anew since drafts seemed to lose
    hopeless: int = 0  # steps in a row in which no draft could have paid
    trial_is_due: bool = False  # after a pause because of that

    def begin_pause(self) -> None:
        self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, _LONGEST_PAUSE)

    def loses(self, num_requests: int) -> bool:
        """Whether drafts do not pay, as far as that can be said already."""
        enough = _ENOUGH if num_requests < _MANY else _ENOUGH_OF_MANY
        if self.plain.count < _ENOUGH or self.drafted.count < enough:
            return False
        ratio = self.drafted.value / self.plain.value
        worthwhile = _WORTHWHILE if num_requests < _MANY else _WORTHWHILE_OF_MANY
        return ratio > (worthwhile if self.drafted.count * num_requests >= _ENOUGH_REQUESTS else _CLEAR_LOSS)


class DraftPayoff:
    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._paused = 0  # steps in a row, of whatever sizes
        self._awake = _WAKING  # steps since the last one asleep
        self._without = self._with = 0.0  # seconds that the last steps would have taken without drafts, and took

    @property
    def speedup(self) -> float:
        """Tokens per second against what they would be without drafts, by an estimate from the last steps."""
        return self._without / self._with if self._with > 0 else 1.0

    def allows_drafts(self, num_requests: int) -> bool:
        """Whether the next step of so many requests may have drafts."""
        batch = self._batch(num_requests)
        if batch.pause:
            batch.pause -= 1
            self._paused += 1
            return False
        self._paused = 0
        return self._awake >= _WAKING and batch.plain.count >= _ENOUGH and batch.since_plain < _REFRESH

    def sleeps(self, num_requests: int) -> bool:
        """Whether there have been no drafts for a while, and steps of so many requests will have none for a while yet.
        To be asked before `allows_drafts`, once for every step."""
        asleep = self._paused >= _WAKING and self._batch(num_requests).pause > _WAKING
        self._awake = 0 if asleep else self._awake + 1
        return asleep

    def note_hope(self, num_requests: int, hope: bool) -> None:
        """Whether in a step of so many requests a sure draft was worth its cost, as far as that is known.

        Where none was for a few steps, nobody looks for a while: a pause known beforehand is one to sleep in. The cost
        may have been measured in a bad moment. So after it comes one step with drafts, whatever they cost."""
        batch = self._batch(num_requests)
        batch.hopeless = 0 if hope else batch.hopeless + 1
        if batch.hopeless == _ENOUGH:
            batch.begin_pause()
            batch.hopeless, batch.trial_is_due = 0, True
            batch.slope.forgive(batch.pause)

    def takes_trial(self, num_requests: int, *, begins: bool) -> bool:
        """Whether that step is due. It `begins`, or first the tokens before it have to be known."""
        batch = self._batch(num_requests)
        due = batch.trial_is_due
        batch.trial_is_due = due and not begins
        return due

    def slope(self, num_requests: int) -> DraftSlope:
        """What verifying drafts adds to a step of about so many requests: more than tokens of a prompt, for each is
        scored."""
        return self._batch(num_requests).slope

    def observe(
        self,
        num_requests: int,
        guessed: bool,
        num_accepted: int,
        seconds: float,
        *,
        catching_up: float = 0.0,
        guessing: float = 0.0,
        num_drafts: int = 0,
    ) -> None:
        """A step that carried nothing but decodes and drafts took so long, `guessing` and `catching_up` included;
        `guessed`: whether any of it went into drafts.

        What went into `catching_up` with tokens of a pause is no fault of the drafts that follow: by that, the longer
        the pause, the surer would be the next. A step that did nothing else is neither one with drafts nor without."""
        batch = self._batch(num_requests)
        tokens = num_requests + num_accepted
        if guessed:
            batch.drafted.add(seconds - catching_up, tokens, min(_GAIN, _GAIN_PER_REQUEST * num_requests))
            batch.since_plain += 1
            if num_drafts:
                batch.slope.add(num_drafts, seconds - max(guessing, catching_up))
        elif not catching_up:
            batch.plain.add(seconds, tokens)
            batch.since_plain = 0
            if not batch.pause:
                batch.slope.forgive()
        if batch.plain.count:
            self._note_speedup(tokens * batch.plain.value, seconds)
        if not guessed:
            return
        if batch.loses(num_requests) and not batch.plain_is_new:
            batch.plain, batch.plain_is_new = Pace(), True  # or is it that the machine has become slower meanwhile?
        elif batch.loses(num_requests):
            batch.plain_is_new = False
            batch.begin_pause()
            batch.drafted = Pace()
        elif batch.since_plain >= _ENOUGH:
            batch.plain_is_new = False
            if batch.drafted.count > max(4 * _ENOUGH, _ENOUGH_REQUESTS / num_requests):
                batch.next_pause = _first_pause(num_requests)

    def _batch(self, num_requests: int) -> _Batch:
        size = num_requests.bit_length()
        if size not in self._batches:
            self._batches[size] = _Batch(next_pause=_first_pause(num_requests))
        return self._batches[size]

    def _note_speedup(self, seconds_without: float, seconds: float) -> None:
        self._without += _GAIN / 3 * (seconds_without - self._without)
        self._with += _GAIN / 3 * (seconds - self._with)


def _first_pause(num_requests: int) -> int:
    return _FIRST_PAUSE if num_requests < _MANY else _FIRST_PAUSE_OF_MANY
