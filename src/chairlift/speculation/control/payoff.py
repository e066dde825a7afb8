"""Whether drafts pay, by the clock: seconds per token in decode steps with drafts and without.

A cost model may be wrong about the few tokens that drafts add. So steps with and without drafts are also compared as
they were measured, for each batch size (in powers of two). Where drafts lose they pause, for longer and longer, with a
short trial after each pause. A trial ends early if it loses much, and the pause after it is so long that all of them
together cost a small share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class SpeculationTuning:
    """Every tuned constant of speculation; `chairlift bench speculation --ablate` shows what each is worth.

    What gained less than its noise was deleted; docs/results/speculation.json has the numbers and exceptions."""

    level_prior_weight: float = 4.0  # draft tokens that a proposer's own confidence counts for
    trial_chance: float = 0.5  # A draft token needs it while its cost is not measured yet.
    gain: float = 0.03  # Weight of the latest step: the acceptance of few requests varies a lot from step to step.
    # Steps of a batch size, with and without drafts, before they are compared. The replays gain nothing from more than
    # one; it is kept so that one slow step of a real machine cannot start a pause.
    enough_steps: int = 3
    refresh: int = 48  # steps with drafts after which one without is measured; else a faster machine is not noticed
    first_pause: int = 128  # steps without drafts after a comparison that they lost; doubled every time
    longest_pause: int = 2048  # Trials would cost 1 to 3% without doubling in long runs in which drafts do not pay.
    trial_loss: float = 1.5  # Steps without drafts that a trial may cost: 1.2% of an answer of 128 tokens.
    most_lost: float = 0.02  # Share of the time: the more a trial lost, the longer is the pause after it.


FIRST_STEPS = 5  # their median counts
INTERRUPTED = 1.5  # times the mean, as which longer steps count


@dataclass(slots=True)
class Pace:
    """Seconds per token of the last steps: the mean of their time by the mean of their tokens."""

    seconds: float = 0.0  # a mean over steps
    tokens: float = 0.0  # a mean over steps
    count: int = 0

    def add(self, seconds: float, tokens: int, gain: float) -> None:
        self.count += 1
        gain = max(gain, 1 / self.count)  # the first ones count equally
        self.seconds += gain * (seconds - self.seconds)
        self.tokens += gain * (tokens - self.tokens)

    @property
    def value(self) -> float:
        return self.seconds / self.tokens


@dataclass(slots=True)
class SteadyPace(Pace):
    """The pace of steps that all take about as long: one that the machine interrupts counts for little.

    Steps without drafts are measured anew from time to time. With a plain mean, one slow step among the first made
    drafts seem to pay for hundreds of steps: on the virtual GPU of `bench speculation --ablate` single replays took 10
    and 20% longer."""

    _first: list[float] = field(default_factory=list)

    def add(self, seconds: float, tokens: int, gain: float) -> None:
        if self.count >= FIRST_STEPS:
            seconds = min(seconds, INTERRUPTED * self.seconds)
        Pace.add(self, seconds, tokens, gain)
        if self.count <= FIRST_STEPS:
            self._first.append(seconds)
            self.seconds = median(self._first)


@dataclass(slots=True)
class DraftSlope:
    """Seconds that one more draft token adds to a step with drafts: the slope of a line through such steps.

    It is not the engine's cost model, whose line goes through steps of all kinds, and is too flat where rows begin to
    cost more."""

    value: float | None = None  # None until two steps differ
    _count: int = 0
    _drafts: float = 0.0  # a mean over steps
    _seconds: float = 0.0
    _variance: float = 0.0  # drafts²
    _covariance: float = 0.0  # drafts × seconds

    def add(self, drafts: int, seconds: float, gain: float) -> None:
        self._count += 1
        gain = max(gain, 1 / self._count)
        more_drafts, more_seconds = drafts - self._drafts, seconds - self._seconds
        self._drafts += gain * more_drafts
        self._seconds += gain * more_seconds
        self._variance = (1 - gain) * (self._variance + gain * more_drafts**2)
        self._covariance = (1 - gain) * (self._covariance + gain * more_drafts * more_seconds)
        if self._variance > 0:
            self.value = max(0.0, self._covariance / self._variance)


@dataclass(slots=True)
class BatchPayoff:
    """Steps of one batch size."""

    next_pause: int
    plain: Pace = field(default_factory=SteadyPace)  # without drafts
    drafted: Pace = field(default_factory=Pace)
    slope: DraftSlope = field(default_factory=DraftSlope)
    pause: int = 0  # steps without drafts left
    since_plain: int = 0
    plain_is_new: bool = False  # measured again since drafts seemed to lose
    in_trial: bool = True  # too few steps with drafts to compare
    lost: float = 0.0  # seconds that steps with drafts took longer than those without, since drafts last paid
    preparing: float = 0.0  # seconds that steps took longer before drafts could be made, since drafts last paid

    def longer(self, seconds: float, tokens: int) -> float:
        """How much longer a step of this many tokens took than without drafts; 0 if that is not known."""
        return seconds - tokens * self.plain.value if self.plain.count else 0.0


@dataclass(slots=True)
class DraftPayoff:
    tuning: SpeculationTuning = field(default_factory=SpeculationTuning)
    _batches: dict[int, BatchPayoff] = field(default_factory=dict)
    _without: float = 0.0  # seconds that the last steps would have taken without drafts
    _with: float = 0.0  # seconds that they took

    @property
    def speedup(self) -> float:
        """Estimated tokens per second relative to decoding without drafts."""
        return self._without / self._with if self._with > 0 else 1.0

    def batch(self, num_requests: int) -> BatchPayoff:
        size = num_requests.bit_length()
        if size not in self._batches:
            # Where drafts lose, they also lose in larger batches, and probably in those of half the size: a batch that
            # shrinks or grows for some steps needs no trials of its own.
            pauses = [known.pause for other, known in self._batches.items() if other <= size + 1]
            self._batches[size] = BatchPayoff(self.tuning.first_pause, pause=max(pauses, default=0))
        return self._batches[size]

    def allows_drafts(self, num_requests: int) -> bool:
        """Whether the next step, of `num_requests`, may have drafts. Called once per step: it counts pauses."""
        batch = self.batch(num_requests)
        if batch.pause:
            batch.pause -= 1
            return False
        return batch.plain.count >= self.tuning.enough_steps and batch.since_plain < self.tuning.refresh

    def observe(
        self, num_requests: int, drafted: bool, num_accepted: int, seconds: float, *, proposing: float, num_drafts: int
    ) -> None:
        """A step of nothing but decodes and drafts took `seconds`, of which `proposing` went into the drafts."""
        tuning, batch = self.tuning, self.batch(num_requests)
        tokens = num_requests + num_accepted
        if batch.plain.count:
            self._without += tuning.gain * (tokens * batch.plain.value - self._without)
            self._with += tuning.gain * (seconds - self._with)
        if not drafted:
            batch.plain.add(seconds, tokens, tuning.gain)
            batch.since_plain = 0
            return
        batch.drafted.add(seconds, tokens, tuning.gain)
        batch.since_plain += 1
        batch.lost = max(0.0, batch.lost + batch.longer(seconds, tokens))
        if num_drafts:
            batch.slope.add(num_drafts, seconds - proposing, tuning.gain)
        self._judge(batch)

    def observe_preparation(self, num_requests: int, num_accepted: int, seconds: float) -> None:
        """A step took `seconds` because drafts of later steps were prepared: it is not compared with others and ends no
        trial, which would never begin if it did. The pause after a trial that loses is longer for it."""
        batch = self.batch(num_requests)
        batch.preparing += max(0.0, batch.longer(seconds, num_requests + num_accepted))

    def _judge(self, batch: BatchPayoff) -> None:
        tuning = self.tuning
        if batch.plain.count < tuning.enough_steps:
            return
        if batch.drafted.count < tuning.enough_steps:
            if self._risks_much(batch):
                self.pause(batch)
            return
        batch.in_trial = False
        if batch.drafted.value <= batch.plain.value:
            batch.plain_is_new, batch.lost, batch.preparing = False, 0.0, 0.0
            batch.next_pause = tuning.first_pause
        elif batch.plain_is_new or self._risks_much(batch):
            self.pause(batch)
        else:
            # First measured again: the machine may have become slower.
            batch.plain, batch.plain_is_new = SteadyPace(), True

    def _risks_much(self, batch: BatchPayoff) -> bool:
        """Whether a trial would lose more than it may by one more step that loses as much as those before."""
        another = batch.lost / max(1, batch.drafted.count)
        return batch.lost + another > self.tuning.trial_loss * batch.plain.seconds

    def pause(self, batch: BatchPayoff) -> None:
        """Stop drafting for a while; a trial follows that measures drafts anew."""
        tuning = self.tuning
        cost = batch.lost + batch.preparing
        earned = cost / (tuning.most_lost * batch.plain.seconds) if batch.plain.seconds > 0 else 0.0
        batch.pause = max(batch.next_pause, min(int(earned), tuning.longest_pause))
        batch.next_pause = min(2 * batch.next_pause, tuning.longest_pause)
        batch.plain_is_new, batch.in_trial, batch.lost, batch.preparing = False, True, 0.0, 0.0
        batch.drafted, batch.slope = Pace(), DraftSlope()
