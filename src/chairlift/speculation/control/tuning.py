"""Every tuned constant of speculation; `chairlift bench speculation --ablate` shows what each is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationTuning:
    """What gained less than its noise was deleted; docs/results/speculation.json has the numbers and exceptions."""

    level_prior_weight: float = 4.0  # draft tokens that a proposer's own confidence counts for
    trial_chance: float = 0.5  # that a draft token needs while its cost is not measured yet
    gain: float = 0.03  # of the latest step in a mean; the acceptance of few requests varies a lot from step to step
    # Steps of a batch size, with and without drafts, before they are compared. The replays gain nothing from more than
    # one; it is kept so that one slow step of a real machine cannot start a pause.
    enough_steps: int = 3
    refresh: int = 48  # steps with drafts after which one without is measured; else a faster machine is not noticed
    first_pause: int = 128  # steps without drafts after a comparison that they lost; doubled every time
    longest_pause: int = 2048  # without doubling, trials cost 1 to 3% in long runs in which drafts do not pay
    trial_loss: float = 1.5  # of a trial, in the time of steps without drafts: 1.2% of an answer of 128 tokens
    most_lost: float = 0.02  # of the time, by trials: the more a trial lost, the longer is the pause after it
