"""Replays recorded answers and drafts on a virtual clock, with the engine's scheduler and controller but no model.

`recording.json.gz` has answers of SmolLM2-135M to the bench's prompts and what its draft head drafted at every
position, where no draft token was verified. A replay verifies the same drafts. Its steps take as long as the constants
below say, with noise, because noise is the reason for most of the controller's caution. Everything is seeded: a replay
always takes the same time. `ablate` measures what each tuned constant is worth: replays with it neutralised, relative
to the default. `python -m chairlift_lab.common.speculation_replay recording.json.gz` makes the recording.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from chairlift.core.budgets.base import FixedBudget
from chairlift.core.events import TokenProduced
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.plan import StepResult
from chairlift.core.policies.base import ContinuousPolicy
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.progress import Note
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.control.payoff import SpeculationTuning
from chairlift.speculation.proposers.base import A_FEW, LEVELS, Draft, DraftTerms, Proposer
from chairlift.speculation.proposers.ngram import NgramProposer
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.workload import SCENARIOS, full_length

RECORDED_HEAD = "draft:smollm2-135m"
MAX_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of steps and drafts on a machine."""

    step: float
    first_rows: float  # Each of the first rows of a step.
    later_rows: float  # Each further row.
    prompt_token: float
    first_pass: float  # The first pass of the draft head.
    later_pass: float
    pass_request: float  # A pass, for each request.
    observing: float = 0.0  # share of a step that the draft head takes to observe what is generated
    catching_up: float = 0.0  # Each request that has had no drafts for a while.
    # Planning and reading a step, while the device computes the one before; a step with drafts waits for it.
    host: float = 0.0
    host_request: float = 0.0

    def decode(self, rows: int) -> float:
        """A step of `rows` tokens."""
        return self.step + self.first_rows * min(rows - 1, FEW_ROWS - 1) + self.later_rows * max(0, rows - FEW_ROWS)

    def drafting(self, passes: int, requests: int) -> float:
        return self.first_pass + (passes - 1) * self.later_pass + passes * self.pass_request * requests


FEW_ROWS = 8

# 2 cores of an AMD EPYC with AVX-512 VNNI, with 8-bit weights. Those of a step fit three measurements in
# docs/results/speculation.json: 139 tokens/s at batch 1, 1,380 at batch 64, and 0.3 ms for a verified row at batch 1.
# All others, and the noise, are estimates that were set by hand.
CPU = Costs(7.2, 0.3, 0.66, 0.4, first_pass=0.8, later_pass=0.35, pass_request=0.06, observing=0.01)
# An H200 with the default model. Measured with 1, 8 and 32 requests: 0.71, 0.77 and 1.24 ms of a step, 0.26, 0.3 and
# 0.5 ms of the host, and 0.48, 0.94 and 1.67 ms of drafts of six tokens. Prompts and catching up are estimates.
H200 = Costs(
    0.71, 0.009, 0.0196, 0.004, first_pass=0.1, later_pass=0.08, pass_request=0.0065, catching_up=0.05,
    host=0.26, host_request=0.008,
)  # fmt: skip

STEP_NOISE, DRIFT, DRIFT_MEMORY = 0.03, 0.01, 0.98  # relative, of each step, and of a pace that lasts for some 50 steps
OUTLIER_SHARE, OUTLIER = 0.01, (1.5, 4.0)  # steps that the machine interrupts, and how many times as long they take


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """An answer of the default model, with what its draft head drafted after each token."""

    prompt: list[int]
    output: list[int]
    drafts: list[list[int]]
    levels: list[str]


@cache
def load_recording() -> dict[str, list[RecordedAnswer]]:
    path = Path(__file__).with_name("recording.json.gz")
    recording: dict[str, list[dict[str, Any]]] = json.loads(gzip.decompress(path.read_bytes()))
    return {name: [RecordedAnswer(**one) for one in some] for name, some in recording.items()}


@dataclass(frozen=True, slots=True)
class ReplayWorkload:
    """`waves` of requests, one after the other; each is (scenario, batch size, number of requests)."""

    name: str
    waves: Sequence[tuple[str, int, int]]
    slowdown: float = 1.0  # factor of all times after half of the waves
    overconfident: int = 0  # levels by which the draft head overstates its confidence
    costs: Costs = CPU

    def answers(self, wave: int) -> list[RecordedAnswer]:
        scenario, _, count = self.waves[wave]
        recorded = load_recording()[scenario]
        return [recorded[index % len(recorded)] for index in range(count)]


@dataclass(slots=True)
class VirtualMachine:
    """A virtual clock with the noise of other load."""

    seed: int
    now: float = 0.0
    pace: float = 1.0
    _drift: float = 0.0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def spend(self, milliseconds: float) -> None:
        random_ = self._random
        self._drift = DRIFT_MEMORY * self._drift + random_.gauss(0.0, DRIFT)
        factor = self.pace * (1 + self._drift) * random_.lognormvariate(0.0, STEP_NOISE)
        if random_.random() < OUTLIER_SHARE:
            factor *= random_.uniform(*OUTLIER)
        self.now += factor * milliseconds / 1e3


class RecordedHeadProposer(Proposer):
    """Proposes the recorded drafts, and takes the time of the draft head."""

    name, max_length = RECORDED_HEAD, 6

    def __init__(self, machine: VirtualMachine, costs: Costs, overconfident: int = 0) -> None:
        """`overconfident`: levels to add to the recorded confidence."""
        self._overconfident = overconfident
        self.answers: dict[str, RecordedAnswer] = {}
        self._machine, self._costs = machine, costs
        self._computed: dict[str, int] = {}  # output tokens of each request that the head has computed

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[Draft | None]:
        done = self._computed.get
        behind = sum(each.num_output - done(each.id, 0) > A_FEW for each in requests) if self._costs.catching_up else 0
        terms.did_extra_work = behind > 0
        if behind:
            self._machine.spend(self._costs.catching_up * behind)
        self._computed.update((request.id, request.num_output) for request in requests)
        drafts: list[Draft | None] = []
        passes = 1
        for request in requests:
            answer, at = self.answers[request.id], request.num_output - 1
            tokens: list[int] = []
            levels: list[int] = []
            likely = 1.0
            recorded = zip(answer.drafts[at], answer.levels[at], strict=True) if at < len(answer.drafts) else ()
            for token, recorded_level in list(recorded)[: terms.length(request)]:
                level = min(int(recorded_level) + self._overconfident, LEVELS - 1)
                if tokens and likely < terms.min_chance_to_extend:
                    break
                passes = max(passes, len(tokens) + 1)
                likely *= terms.chances_for(request)[level]
                if likely < terms.min_chance:
                    break
                tokens.append(token)
                levels.append(level)
            drafts.append(Draft(tokens, levels))
        self._machine.spend(self._costs.drafting(passes, len(requests)))
        return drafts


def replay(
    workload: ReplayWorkload, proposer: str | None, tuning: SpeculationTuning = SpeculationTuning(), seed: int = 0
) -> float:
    """Virtual seconds for all requests of a workload, with `proposer` or without speculation."""
    machine, costs = VirtualMachine(seed), workload.costs
    head = RecordedHeadProposer(machine, costs, workload.overconfident)
    speculation = None
    if proposer is not None:
        chosen = head if proposer == RECORDED_HEAD else NgramProposer()
        speculation = SpeculationController(chosen, tuning=tuning, clock=lambda: machine.now)
    for wave, (_, batch, _) in enumerate(workload.waves):
        if wave == len(workload.waves) // 2 and wave:
            machine.pace = workload.slowdown
        answers = {f"w{wave}-{index}": one for index, one in enumerate(workload.answers(wave))}
        head.answers = answers
        scheduler = Scheduler(
            KVCache(batch * 40, 16, prefix_caching=False),
            FixedBudget.of(MAX_BATCH_TOKENS),
            ContinuousPolicy(),
            batch,
            speculation=speculation,
        )
        for request_id, one in answers.items():
            params = SamplingParams(temperature=0.0, max_tokens=len(one.output))
            scheduler.submit(Request(request_id, one.prompt, params, max_new_tokens=len(one.output), arrival=0.0), 0.0)
        while scheduler.has_work:
            _step(scheduler, answers, machine, costs, 1 + costs.observing * (proposer == RECORDED_HEAD))
    return machine.now


def _step(
    scheduler: Scheduler,
    answers: dict[str, RecordedAnswer],
    machine: VirtualMachine,
    costs: Costs,
    overhead: float,
) -> None:
    start_time = machine.now
    plan = scheduler.schedule(start_time)
    tokens: list[int] = []
    accepted: dict[str, int] = {}
    for chunk in plan.chunks:
        if chunk.samples:
            right = answers[chunk.request.id].output[chunk.known_end - chunk.request.num_prompt :]
            count = 0
            while count < len(chunk.drafts) and chunk.drafts[count] == right[count]:
                count += 1
            tokens += right[: 1 + count]
            if count:
                accepted[chunk.request.id] = count
    rows = plan.num_decode_tokens
    device = overhead * (costs.decode(max(rows, 1)) + costs.prompt_token * (plan.num_tokens - rows))
    host = costs.host + costs.host_request * len(plan.chunks)
    waited = scheduler.speculation is not None and scheduler.speculation.drafting
    machine.spend(host + device if waited else max(host, device))
    result = StepResult(plan, tokens, [None] * len(tokens), accepted=accepted)
    scheduler.apply(result, machine.now)
    if scheduler.speculation is not None:
        scheduler.speculation.observe(result, machine.now - start_time, waited=waited)
    scheduler.drain_events()


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

MACHINES = {"CPU": CPU, "H200": H200}


WORKLOADS = tuple(
    ReplayWorkload(**each | {"costs": MACHINES[each.get("costs", "CPU")]})
    for each in json.loads(Path(__file__).with_suffix(".json").read_text())
)


def ablate(seeds: int = 1, note: Note = lambda text: None) -> list[dict[str, Any]]:
    """A row for each change: the time of all replays relative to the default, all with the same seeds and noise.

    `ratio` is the geometric mean over all workloads and proposers (above 1: the constant saves time), `noise` the
    standard error of its logarithm.
    """
    cases = [(workload, proposer, seed) for workload in WORKLOADS for proposer in PROPOSERS for seed in range(seeds)]
    workloads, proposers, seed_of = zip(*cases, strict=True)
    with ProcessPoolExecutor() as pool:

        def seconds(tuning: SpeculationTuning) -> list[float]:
            return [*pool.map(replay, workloads, proposers, [tuning] * len(cases), seed_of)]

        note("the default")
        default = seconds(SpeculationTuning())
        rows = []
        for name, changed in CHANGES.items():
            note(f"without {name}")
            rows.append(_compare(name, changed, cases, seconds(replace(SpeculationTuning(), **changed)), default))
    return rows


def earns_its_place(row: Mapping[str, Any]) -> bool:
    """Whether the constant saves time beyond the noise on average, or 3% in one workload."""
    return bool(math.log(row["ratio"]) > 2 * row["noise"] or row["worst_ratio"] > 1.03)


def _compare(
    name: str,
    changed: Mapping[str, Any],
    cases: Sequence[tuple[ReplayWorkload, str, int]],
    seconds: Sequence[float],
    default: Sequence[float],
) -> dict[str, Any]:
    logs: dict[str, list[float]] = {}
    for (workload, proposer, _), one, other in zip(cases, seconds, default, strict=True):
        logs.setdefault(f"{workload.name}, {proposer}", []).append(math.log(one / other))
    every = [log for some in logs.values() for log in some]
    ratios = {key: math.exp(mean(some)) for key, some in logs.items()}
    worst = max(ratios, key=lambda key: ratios[key])
    return {
        "name": name,
        "changed": changed,
        "ratio": math.exp(mean(every)),
        "noise": stdev(every) / len(every) ** 0.5,
        "ratios": ratios,
        "worst_workload": worst,
        "worst_ratio": ratios[worst],
    }


# ---- the recording --------------------------------------------------------------------------------------------------


class DraftRecorder(Proposer):
    """Keeps what another proposer drafts, and proposes nothing."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.name, self.max_length = proposer.name, proposer.max_length
        self.drafts: dict[tuple[str, int], Draft] = {}  # The keys are request ids and numbers of output tokens.

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[None]:
        for request, draft in zip(requests, self._proposer.propose(requests, terms), strict=True):
            if draft is not None:
                self.drafts[request.id, request.num_output] = draft
        return [None] * len(requests)

    def forget(self, request_id: str) -> None:
        self._proposer.forget(request_id)


def record(maker: EngineMaker, scenario: str, speculate: str, answers: int, tokens: int) -> list[RecordedAnswer]:
    """The model's first `answers` answers of a scenario, of `tokens` tokens each, with the drafts of `speculate`."""
    from chairlift.speculation.head_layers import MAX_LENGTH
    from chairlift_lab.bench.speculation import encode_prompt

    # One request at a time: neither its tokens nor the room for its drafts depends on others.
    engine = maker.engine(max_batch_requests=1, speculate=speculate, draft_length=MAX_LENGTH)
    controller = engine.scheduler.speculation
    assert isinstance(controller, SpeculationController)
    controller.proposer = recorder = DraftRecorder(controller.proposer)
    prompts = [encode_prompt(maker, SCENARIOS[scenario](index)) for index in range(answers)]
    outputs: dict[str, list[int]] = {engine.submit(prompt, full_length(tokens))[0]: [] for prompt in prompts}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                outputs[event.request_id].append(event.token)
    engine.check_alive()
    recorded = []
    for prompt, (request_id, output) in zip(prompts, outputs.items(), strict=True):
        drafts = [recorder.drafts.get((request_id, count), Draft((), ())) for count in range(1, len(output))]
        levels = ["".join(map(str, draft.levels)) for draft in drafts]
        recorded.append(RecordedAnswer(prompt, output, [list(draft.tokens) for draft in drafts], levels))
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the default model's answers and its draft head's drafts.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default=RECORDED_HEAD)
    parser.add_argument("--answers", type=int, default=16, help="per scenario")
    parser.add_argument("--tokens", type=int, default=96, help="per answer")
    given = parser.parse_args()
    maker = EngineMaker.load(given.model, {"device": "cpu", "prefix_caching": False})
    recording = {
        scenario: [asdict(one) for one in record(maker, scenario, given.speculate, given.answers, given.tokens)]
        for scenario in SCENARIOS
    }
    given.file.write_bytes(gzip.compress(json.dumps(recording, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
