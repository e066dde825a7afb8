"""Measures what each tuned constant of speculation is worth: replays with it neutralised, relative to the default."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import Any

from chairlift.progress import Note
from chairlift.speculation.control.tuning import SpeculationTuning
from chairlift_lab.bench.speculation.replay import H200, RECORDED_HEAD, ReplayWorkload, replay

PROPOSERS = ("ngram", RECORDED_HEAD)
NEVER = 10**9  # steps

# Each constant, or the constants of one mechanism, with values that neutralise it.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "level_prior_weight": {"level_prior_weight": 0.01},
    "calibration": {"level_prior_weight": 1e9},
    "trial_chance": {"trial_chance": 0.0},
    "gain": {"gain": 0.15},
    "enough_steps": {"enough_steps": 1},
    "refresh": {"refresh": NEVER},
    "first_pause": {"first_pause": 0, "longest_pause": 0},
    "trial_loss": {"trial_loss": 1e9},
    "most_lost": {"most_lost": 1e9},
    "longest_pause": {"longest_pause": SpeculationTuning().first_pause},
}

WORKLOADS = (
    ReplayWorkload("quotes, batch 1", (("quotes", 1, 8),) * 2),
    ReplayWorkload("chat, batch 1", (("chat", 1, 8),) * 2),
    ReplayWorkload("quotes, batch 4", (("quotes", 4, 16),) * 3),
    ReplayWorkload("chat, batch 4", (("chat", 4, 16),) * 3),
    ReplayWorkload("code-edit, batch 4", (("code-edit", 4, 16),) * 3),
    ReplayWorkload("quotes, batch 16", (("quotes", 16, 48),) * 3),
    ReplayWorkload("chat, batch 16", (("chat", 16, 320),)),
    ReplayWorkload("chat, batch 64", (("chat", 64, 128),)),
    ReplayWorkload(
        "all sizes",
        (("quotes", 1, 4), ("chat", 16, 48), ("quotes", 4, 16), ("chat", 4, 16), ("code-edit", 16, 32), ("chat", 2, 8)),
    ),
    ReplayWorkload("machine slows down", (("quotes", 4, 16),) * 4, slowdown=1.4),
    ReplayWorkload("machine speeds up", (("chat", 2, 8), ("chat", 4, 16)) * 3, slowdown=0.6),
    ReplayWorkload("overconfident head", (("chat", 1, 4), ("chat", 4, 16), ("quotes", 16, 48)), overconfident=4),
    ReplayWorkload("quotes, batch 1, GPU", (("quotes", 1, 8),) * 2, costs=H200),
    ReplayWorkload("chat, batch 1, GPU", (("chat", 1, 8),) * 2, costs=H200),
    ReplayWorkload("quotes, batch 8, GPU", (("quotes", 8, 32),) * 2, costs=H200),
    ReplayWorkload("chat, batch 8, GPU", (("chat", 8, 32),) * 2, costs=H200),
    ReplayWorkload("chat, batch 32, GPU", (("chat", 32, 128),) * 2, costs=H200),
    ReplayWorkload(
        "all sizes, GPU", (("chat", 32, 64), ("quotes", 1, 4), ("chat", 4, 16), ("quotes", 8, 32)), costs=H200
    ),
)


@dataclass(frozen=True, slots=True)
class AblationPoint:
    """The time of all replays with one change, relative to the default."""

    name: str
    changed: Mapping[str, Any]
    ratio: float  # the geometric mean over all workloads and proposers; above 1: the constant saves time
    noise: float  # the standard error of its logarithm
    ratios: Mapping[str, float]  # by workload and proposer

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.ratios.items(), key=lambda item: item[1])

    @property
    def earns_its_place(self) -> bool:
        """Whether the constant saves time beyond the noise on average, or 3% in one workload."""
        return math.log(self.ratio) > 2 * self.noise or self.worst[1] > 1.03

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"worst_workload": self.worst[0], "worst_ratio": self.worst[1]}


def ablate(seeds: int = 1, note: Note = lambda text: None) -> list[AblationPoint]:
    """Replay all workloads with each change, all with the same seeds and so the same noise."""
    cases = [(workload, proposer, seed) for workload in WORKLOADS for proposer in PROPOSERS for seed in range(seeds)]
    with ProcessPoolExecutor() as pool:

        def seconds(tuning: SpeculationTuning) -> list[float]:
            return [*pool.map(_replay, [(*case, tuning) for case in cases])]

        note("the default")
        default = seconds(SpeculationTuning())
        points = []
        for name, changed in CHANGES.items():
            note(f"without {name}")
            points.append(_compare(name, changed, cases, seconds(replace(SpeculationTuning(), **changed)), default))
    return points


def _replay(case: tuple[ReplayWorkload, str, int, SpeculationTuning]) -> float:
    workload, proposer, seed, tuning = case
    return replay(workload, proposer, tuning, seed)


def _compare(
    name: str,
    changed: Mapping[str, Any],
    cases: Sequence[tuple[ReplayWorkload, str, int]],
    seconds: Sequence[float],
    default: Sequence[float],
) -> AblationPoint:
    logs: dict[str, list[float]] = {}
    for (workload, proposer, _), one, other in zip(cases, seconds, default, strict=True):
        logs.setdefault(f"{workload.name}, {proposer}", []).append(math.log(one / other))
    every = [log for some in logs.values() for log in some]
    ratios = {key: math.exp(mean(some)) for key, some in logs.items()}
    return AblationPoint(name, changed, math.exp(mean(every)), stdev(every) / len(every) ** 0.5, ratios)
