"""Time to first token and time per output token, by batch size and prompt length."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from chairlift.core.events import TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift_lab.bench.shapes.run import WARM_UP_TOKENS
from chairlift_lab.common.floor import Ceilings, ModelCost, floor_seconds

WARM_UPS = 2  # a prompt's step is captured when its shape occurs for the second time


@dataclass(frozen=True, slots=True)
class LatencySettings:
    batches: Sequence[int] = (1, 8, 32)
    prompt_tokens: Sequence[int] = (128, 512)
    output_tokens: int = 32
    repeat: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for parameter, values in (("batch", self.batches), ("prompt_tokens", self.prompt_tokens)):
            if not values or min(values) < 1:
                raise InvalidParameter(parameter, f"needs numbers of at least 1, got {list(values)}")
        if self.output_tokens < 2:
            raise InvalidParameter("output_tokens", f"must be at least 2, got {self.output_tokens}")
        if self.repeat < 1:
            raise InvalidParameter("repeat", f"must be at least 1, got {self.repeat}")


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """`batch` requests of one length, sent at once: medians over the repeats."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float  # until the median request has its first token
    last_ttft_seconds: float  # until all have
    ttft_floor_seconds: float  # the least until all have
    tpot_seconds: float  # for each token after the first
    tpot_floor_seconds: float
    seconds: float  # until all have ended

    @property
    def ttft_share_of_floor(self) -> float:
        return self.ttft_floor_seconds / self.last_ttft_seconds

    @property
    def tpot_share_of_floor(self) -> float:
        return self.tpot_floor_seconds / self.tpot_seconds

    def row(self) -> dict[str, Any]:
        return {
            "name": f"{self.batch} requests of {self.prompt_tokens} tokens",
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": 1e3 * self.ttft_seconds,
            "last_ttft_ms": 1e3 * self.last_ttft_seconds,
            "ttft_floor_ms": 1e3 * self.ttft_floor_seconds,
            "ttft_share_of_floor": self.ttft_share_of_floor,
            "tpot_ms": 1e3 * self.tpot_seconds,
            "tpot_floor_ms": 1e3 * self.tpot_floor_seconds,
            "tpot_share_of_floor": self.tpot_share_of_floor,
            "e2e_ms": 1e3 * self.seconds,
            "output_tokens_per_s": self.batch * self.output_tokens / self.seconds,
        }


def measure_latency(
    engine: Engine, cost: ModelCost, ceilings: Ceilings, settings: LatencySettings, note: Note = lambda text: None
) -> list[LatencyPoint]:
    rng = random.Random(settings.seed)
    points = []
    for length in settings.prompt_tokens:
        for batch in settings.batches:
            # What is compiled or captured on first use is no part of the figures.
            note(f"{batch} requests of {length} tokens: warm-up")
            for _ in range(WARM_UPS):
                _run(engine, batch, length, WARM_UP_TOKENS, rng)
            runs = []
            for turn in range(settings.repeat):
                note(f"{batch} requests of {length} tokens: {turn + 1} of {settings.repeat}")
                runs.append(_run(engine, batch, length, settings.output_tokens, rng))
            points.append(_point(runs, batch, length, settings.output_tokens, cost, ceilings))
    return points


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds since all requests were sent."""

    firsts: list[float]  # of each request, when its first token came
    lasts: list[float]

    @property
    def mean_tpot(self) -> float:
        gaps = [last - first for first, last in zip(self.firsts, self.lasts, strict=True)]
        return sum(gaps) / len(gaps)


def _run(engine: Engine, batch: int, length: int, output: int, rng: random.Random) -> _Run:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output, detokenize=False)
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(length)] for _ in range(batch)]
    begun = time.perf_counter()
    ids = [engine.submit(prompt, params)[0] for prompt in prompts]
    engine.expect_no_more()
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - begun
        for event in events:
            if isinstance(event, TokenProduced):
                first.setdefault(event.request_id, now)
                last[event.request_id] = now
    engine.check_alive()
    return _Run([first[one] for one in ids], [last[one] for one in ids])


def _point(
    runs: Sequence[_Run], batch: int, length: int, output: int, cost: ModelCost, ceilings: Ceilings
) -> LatencyPoint:
    prompts = [length] * batch
    first_floor = floor_seconds(prompts, [1] * batch, cost, ceilings)
    whole_floor = floor_seconds(prompts, [output] * batch, cost, ceilings)
    return LatencyPoint(
        batch=batch,
        prompt_tokens=length,
        output_tokens=output,
        ttft_seconds=median(median(run.firsts) for run in runs),
        last_ttft_seconds=median(max(run.firsts) for run in runs),
        ttft_floor_seconds=first_floor,
        tpot_seconds=median(run.mean_tpot for run in runs) / (output - 1),
        tpot_floor_seconds=(whole_floor - first_floor) / (output - 1),
        seconds=median(max(run.lasts) for run in runs),
    )
