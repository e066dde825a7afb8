"""Records a real run together with a cost profile, to compare the simulator with it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.core.targets import Targets
from chairlift.errors import InvalidParameter
from chairlift.options import read_text
from chairlift_lab.common.workload import BenchRequest, LengthRange
from chairlift_lab.load.traces import Arrivals
from chairlift_lab.planning.prediction import ReplicaSettings, simulate_alone
from chairlift_lab.report.options import Count, Positive, Settings
from chairlift_lab.simulator.outcome import Arrival, Gaps, RequestRecord, SimulationOutcome, figures
from chairlift_lab.simulator.replica import Replica
from chairlift_lab.simulator.step_cost import MeasuredCost

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine
    from chairlift_lab.common.engines import Measurement

MAX_RECORDING_MIB = 1024

_LATENCIES = tuple(f"{name}_p{share}_ms" for name in ("ttft", "tpot", "e2e") for share in (50, 95))
PART = 40  # requests per part: much longer than one request, short against changes of the machine's speed
WALKS = 8  # simulations per part, each starting at another place of the recorded speed
COMPARED = ("requests_per_s", "output_tokens_per_s", *_LATENCIES)

Part = tuple[tuple[float, int, int], ...]
"""Requests: (when it comes, prompt tokens, output tokens)."""


_run = partial(typer.Option, rich_help_panel="The recorded run")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(Settings):
    """The traffic of the recorded run."""

    requests: Annotated[Count, _run(help="Number of requests.")] = 100
    prompt_len: Annotated[str, _run(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.")] = "16:256"
    output_len: Annotated[str, _run(metavar="LOW:HIGH", help="Output tokens, log-uniform.")] = "8:64"
    load: Annotated[Positive, _run(help="Request rate, as a share of the machine's throughput.")] = 0.7
    seed: Annotated[int, _run(help="The same seed gives the same requests.")] = 0

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        self.ranges()

    def ranges(self) -> list[LengthRange]:
        """The lengths of prompts and of outputs."""
        return [LengthRange.parse(name, getattr(self, name)) for name in ("prompt_len", "output_len")]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run in parts, with profile measurements in between, so that both see the same speed of the machine. Each part
    begins and ends without running requests."""

    replica: ReplicaSettings
    cost: MeasuredCost
    parts: tuple[Part, ...]
    measured: dict[str, Any]  # figures of `simulator.figures`

    def simulated(self) -> dict[str, Any]:
        """Figures of the same traffic on the virtual clock, averaged over slow and fast periods of the machine."""
        outcome = SimulationOutcome()
        for index, part in enumerate(self.parts):
            for walk in range(WALKS):
                begin = (index / len(self.parts) + walk / WALKS) % 1.0
                outcome.add(_simulated(part, self.replica.make(self.cost, begin)))
        return figures(outcome, Targets())

    def to_json(self) -> dict[str, Any]:
        parts = [[[round(at, 6), n_in, n_out] for at, n_in, n_out in part] for part in self.parts]
        return {"replica": asdict(self.replica), "parts": parts, "measured": self.measured}

    @classmethod
    def load(cls, path: Path) -> RecordedRun:
        """Load a file of `chairlift bench profile --record`."""
        try:
            saved = json.loads(read_text(path, "against", MAX_RECORDING_MIB))
            run = saved["run"]
            parts = tuple(
                tuple((float(at), int(n_in), int(n_out)) for at, n_in, n_out in part) for part in run["parts"]
            )
            cost = MeasuredCost.from_json(saved["prices"])
            replica = run["replica"]
            if "seats" in replica:  # Recordings of earlier versions have this name.
                replica["slots"] = replica.pop("seats")
            replica["budget"] = replica.get("budget") or "fixed"  # Earlier versions recorded no other.
            return cls(ReplicaSettings(**replica), cost, parts, run["measured"])
        except (OSError, ValueError, KeyError, TypeError, InvalidParameter) as error:
            problem = f"cannot read {str(path)!r} ({error!r}); bench profile --record writes such a file"
            raise InvalidParameter("against", problem) from None


def compare(run: RecordedRun) -> list[dict[str, Any]]:
    """One row per figure: measured, simulated and relative error."""
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


class RunRecorder:
    """Sends requests to an engine and records their outcomes. `replica` has the scheduler settings of `engine`."""

    def __init__(self, engine: Engine, replica: ReplicaSettings, cost: MeasuredCost, settings: RunOptions) -> None:
        """`cost` gives the machine's throughput, of which the load is a share."""
        self._engine = engine
        self._replica = replica
        self._rng = random.Random(f"recording {settings.seed}")
        self._parts = _draw(settings, replica, cost, self._rng)
        self._num_run = 0
        self._outcome = SimulationOutcome()

    def keep_up(self, share: float) -> None:
        """Run parts until this share of all is done."""
        while self._num_run < round(share * len(self._parts)):
            self._run(self._parts[self._num_run])
            self._num_run += 1

    def _run(self, part: Part) -> None:
        from chairlift_lab.bench.profile import watch_steps
        from chairlift_lab.common.engines import Session, run_sessions

        engine, rng = self._engine, self._rng
        sessions = [
            Session((BenchRequest(tuple(rng.randrange(engine.vocab_size) for _ in range(n_in)), n_out),))
            for _, n_in, n_out in part
        ]
        watched = watch_steps(engine)
        measured = run_sessions(engine, sessions, arrivals=[at for at, *_ in part])
        self._outcome.add(_outcome(measured, part, sum(seconds for _, seconds in watched.steps)))

    def recorded(self, cost: MeasuredCost) -> RecordedRun:
        """The recorded run with the prices of a profile."""
        self.keep_up(1.0)
        return RecordedRun(self._replica, cost, self._parts, figures(self._outcome, Targets()))


def _draw(settings: RunOptions, replica: ReplicaSettings, cost: MeasuredCost, rng: random.Random) -> tuple[Part, ...]:
    """Draw the traffic in parts of about the same number of requests, each starting at time 0."""
    count = settings.requests
    n_in, n_out = settings.ranges()
    lengths = [(n_in.draw(rng), n_out.draw(rng)) for _ in range(count)]
    at_once = _simulated([(0.0, *pair) for pair in lengths], replica.make(cost))
    rate = settings.load * count / at_once.seconds
    times = list(islice(Arrivals(rate, 1.0).times(settings.seed), count))
    num_parts = max(1, count // PART)
    starts = [index * count // num_parts for index in range(num_parts + 1)]
    return tuple(
        tuple((times[index] - times[start], *lengths[index]) for index in range(start, end))
        for start, end in pairwise(starts)
    )


def _simulated(part: Sequence[tuple[float, int, int]], replica: Replica) -> SimulationOutcome:
    arrivals = [Arrival(at, [index] * n_in, n_out) for index, (at, n_in, n_out) in enumerate(part)]
    return simulate_alone(arrivals, replica)


def _outcome(measured: Measurement, part: Part, busy: float) -> SimulationOutcome:
    """A measured run as a simulation outcome, for the same figures code."""
    assert measured.inside is not None
    records = [
        RequestRecord(at, n_in, n_out, 0, times[0], times[-1])
        for (at, n_in, n_out), times in zip(part, measured.token_times, strict=True)
    ]
    gaps = Gaps((later - earlier, 1) for times in measured.token_times for earlier, later in pairwise(times))
    inside, seconds = measured.inside, measured.seconds
    return SimulationOutcome(records, seconds, inside.steps, busy, inside.preemptions, gaps, replica_seconds=seconds)
