"""A real run, written down with what the simulator needs to repeat it: is it right?"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.bench.arrivals import Arrivals
from chairlift.bench.simulation import ReplicaSettings
from chairlift.bench.workload import BenchRequest, LengthRange, Workload
from chairlift.errors import InvalidParameter
from chairlift.simulate.figures import Targets, figures
from chairlift.simulate.measured import MeasuredCost
from chairlift.simulate.records import Arrival, Gaps, Outcome, Record
from chairlift.simulate.router import make_router
from chairlift.simulate.run import simulate

if TYPE_CHECKING:
    from chairlift.bench.measure import Measurement
    from chairlift.bench.profile import WatchedCost
    from chairlift.execution.engine import Engine

_LATENCIES = tuple(f"{name}_p{share}_ms" for name in ("ttft", "tpot", "e2e") for share in (50, 95))
COMPARED = ("requests_per_s", "output_tokens_per_s", *_LATENCIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The traffic of the recorded run."""

    prompt_len: LengthRange
    output_len: LengthRange
    requests: int = 100
    load: float = 0.7  # requests per second, as a share of what the machine gets done when all come at once
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "load"):
            if not getattr(self, name) > 0:
                raise InvalidParameter(name, f"must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    replica: ReplicaSettings
    cost: MeasuredCost
    requests: tuple[tuple[float, int, int], ...]  # (when it came, prompt tokens, output tokens)
    measured: dict[str, Any]  # the figures that `simulate.figures` gives

    def simulated(self) -> dict[str, Any]:
        """The figures of the same traffic on the virtual clock."""
        outcome = simulate(_arrivals(self.requests), [self.replica.make(self.cost)], make_router("round-robin"))
        return figures(outcome, 1, Targets())

    def to_json(self) -> dict[str, Any]:
        requests = [[round(at, 6), n_in, n_out] for at, n_in, n_out in self.requests]
        return {"replica": asdict(self.replica), "requests": requests, "measured": self.measured}

    @classmethod
    def load(cls, path: Path) -> RecordedRun:
        """What `chairlift bench profile --record` wrote."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            run = saved["run"]
            requests = tuple((float(at), int(n_in), int(n_out)) for at, n_in, n_out in run["requests"])
            return cls(
                ReplicaSettings(**run["replica"]), MeasuredCost.from_json(saved["prices"]), requests, run["measured"]
            )
        except (OSError, ValueError, KeyError, TypeError, InvalidParameter) as error:
            problem = f"cannot read {str(path)!r} ({error!r}); bench profile --record writes such a file"
            raise InvalidParameter("against", problem) from None


def compare(run: RecordedRun) -> list[dict[str, Any]]:
    """One row for each figure: as it was measured, as it is simulated, and how far off that is."""
    simulated = run.simulated()
    return [
        {
            "name": name,
            "measured": run.measured[name],
            "simulated": simulated[name],
            "error": simulated[name] / run.measured[name] - 1,
        }
        for name in COMPARED
        if run.measured[name] is not None and simulated[name] is not None
    ]


def record_run(engine: Engine, replica: ReplicaSettings, cost: MeasuredCost, settings: RunSettings) -> RecordedRun:
    """Let requests come one by one, and write down what became of them. `replica` plans as `engine` does."""
    from chairlift.bench.engine_run import measure_engine
    from chairlift.bench.profile import watch_steps

    rng = random.Random(f"recording {settings.seed}")
    lengths = [(settings.prompt_len.draw(rng), settings.output_len.draw(rng)) for _ in range(settings.requests)]
    at_once = simulate(_arrivals([(0.0, *pair) for pair in lengths]), [replica.make(cost)], make_router("round-robin"))
    rate = settings.load * settings.requests / at_once.seconds
    times = list(islice(Arrivals(rate, 1.0).times(settings.seed), settings.requests))
    workload = Workload(
        tuple(
            BenchRequest(tuple(rng.randrange(engine.vocab_size) for _ in range(n_in)), n_out) for n_in, n_out in lengths
        )
    )
    watched = watch_steps(engine)
    measured = measure_engine(engine, workload, lambda tokens: None, times)
    requests = tuple((at, *pair) for at, pair in zip(times, lengths, strict=True))
    return RecordedRun(replica, cost, requests, _figures(measured, requests, watched))


def _arrivals(requests: Sequence[tuple[float, int, int]]) -> list[Arrival]:
    return [Arrival(at, [index] * n_in, n_out) for index, (at, n_in, n_out) in enumerate(requests)]


def _figures(measured: Measurement, requests: Sequence[tuple[float, int, int]], watched: WatchedCost) -> dict[str, Any]:
    """The same figures as of a simulation, by the same code."""
    assert measured.inside is not None
    records = [
        Record(at, n_in, n_out, 0, times[0], times[-1])
        for (at, n_in, n_out), times in zip(requests, measured.token_times, strict=True)
    ]
    gaps = Gaps((later - earlier, 1) for times in measured.token_times for earlier, later in pairwise(times))
    steps = measured.inside.steps  # those before were the warm-up
    busy = sum(seconds for _, seconds in watched.steps[-steps:])
    return figures(Outcome(records, measured.seconds, steps, busy, measured.inside.preemptions, gaps), 1, Targets())
