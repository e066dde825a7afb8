"""Runs the cases of `chairlift bench shapes` on a model of a given shape with random weights."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.server.process.this_process import loaded_objects_frozen
from chairlift_lab.common.engines import serve_at_once
from chairlift_lab.common.floor import Ceilings, ModelCost, ceilings_for, floor_seconds
from chairlift_lab.common.model_shapes import config_file

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

VOCABULARY = 10_001  # token ids of prompts
WARM_UP_REQUESTS, WARM_UP_TOKENS = 256, 6  # Enough steps for graphs to be captured.


@dataclass(frozen=True, slots=True)
class ShapeCase:
    name: str
    prompts: list[list[int]]
    outputs: list[int]


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """The rows of all cases, and what they depend on."""

    rows: list[dict[str, Any]]
    ceilings: Ceilings
    ready_seconds: float  # It is counted from the import of torch to the first token.
    vocabulary: int  # number of token ids that prompts are drawn from


class Cases(NamedTuple):
    """What both engines run: the cases by name for the first `layers` of a shape, all lengths divided by `scale`."""

    shape: str
    config: EngineConfig
    names: Sequence[str]
    scale: int = 1
    layers: int | None = None


def make_cases(names: Sequence[str], vocab: int, scale: int = 1) -> list[ShapeCase]:
    """Requests for the cases by name; `scale` divides all lengths.

    decode-N: N requests of 128 + 256 tokens. load-N: N requests of 100 to 1,024 tokens each way, all at once.
    prefill-N: N prompts of 2,048 tokens with one output token each.

    load-N-SEED: other lengths. With a vocabulary of `VOCABULARY` and scale 1, load-256, load-256-1 and load-1024-3 are
    the requests of a workload that is in public use (nano-vllm's benchmark), token by token.
    """
    return [_make_case(name, vocab, scale) for name in names]


def _make_case(name: str, vocab: int, scale: int) -> ShapeCase:
    parts = re.fullmatch(r"(decode|prefill)-([1-9]\d*)|(load)-([1-9]\d*)(?:-(\d+))?", name)
    if parts is None:
        raise InvalidParameter("cases", f"unknown case {name!r}; choose from decode-N, load-N[-SEED], prefill-N")
    kind, count = parts[1] or parts[3], int(parts[2] or parts[4])
    # One engine runs all cases: a prompt of one must not be cached for another.
    rng = random.Random(int(parts[5] or 0) if kind == "load" else name)
    spans = {"decode": ((128, 128), (256, 256)), "load": ((100, 1024), (100, 1024)), "prefill": ((2048, 2048), (1, 1))}
    (low_in, high_in), (low_out, high_out) = (tuple(max(1, limit // scale) for limit in span) for span in spans[kind])
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(low_in, high_in))] for _ in range(count)]
    return ShapeCase(name, prompts, [rng.randint(low_out, high_out) for _ in range(count)])


def warm_up_of(case: ShapeCase) -> ShapeCase:
    """A warm-up that compiles, captures and allocates what the case needs.

    Its prompts have the same lengths but are reversed, so that no prefix of the case is cached.
    """
    prompts = [prompt[::-1] for prompt in case.prompts[:WARM_UP_REQUESTS]]
    return ShapeCase("warm-up", prompts, [min(WARM_UP_TOKENS, count) for count in case.outputs[:WARM_UP_REQUESTS]])


def run_shape(cases: Cases, note: Note) -> ShapeRun:
    from chairlift.engine.startup import load_engine
    from chairlift_lab.common.step_work import model_cost

    begin = time.perf_counter()
    note("starting")
    with config_file(cases.shape, layers=cases.layers) as path:
        started = load_engine(path, cases.config, progress=False)
    model = started.runner.model
    serve_at_once(started.engine, [[1]], [1])
    ready = time.perf_counter() - begin
    note("capturing graphs")
    started.runner.capture_decodes()
    note("measuring the ceilings")
    ceilings = ceilings_for(model)
    cost = model_cost(started)
    vocabulary = min(VOCABULARY, model.vocab_size)
    rows = []
    for case in make_cases(cases.names, vocabulary, cases.scale):
        warm_up = warm_up_of(case)
        serve_at_once(started.engine, warm_up.prompts, warm_up.outputs)
        started.runner.capture_missed()  # A server does this while idle.
        note(f"{case.name}: {len(case.prompts)} requests")
        with loaded_objects_frozen():  # The server does the same.
            rows.append(run_case(started.engine, case, cost, ceilings))
    return ShapeRun(rows, ceilings, ready, vocabulary)


def run_case(engine: Engine, case: ShapeCase, cost: ModelCost, ceilings: Ceilings) -> dict[str, Any]:
    served = serve_at_once(engine, case.prompts, case.outputs)
    lengths = [len(prompt) for prompt in case.prompts]
    tokens = sum(map(len, served.token_times))
    floor = floor_seconds(lengths, case.outputs, cost, ceilings)
    return {
        "name": case.name,
        "requests": len(case.prompts),
        "prompt_tokens": sum(lengths),
        "output_tokens": tokens,
        "seconds": served.seconds,
        "floor_seconds": floor,
        "steps": len(served.steps),
        "device_seconds": sum(step.timing.forward + step.timing.sample for step in served.steps),
        "host_seconds": sum(
            step.schedule_seconds + step.apply_seconds + step.timing.build for step in served.steps
        ),  # scheduling, packing and applying
        "tokens_per_second": tokens / served.seconds,
        "share_of_floor": floor / served.seconds,
    }
