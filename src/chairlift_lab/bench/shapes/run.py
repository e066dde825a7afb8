"""The speed of a model of a given shape, with random weights: single requests, batches, load and prompts."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chairlift.config import EngineConfig
from chairlift.core.events import StepDone, TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import StartedEngine, load_engine
from chairlift.errors import InvalidParameter
from chairlift.models.decoder import Decoder
from chairlift.progress import Note
from chairlift.server.process.this_process import loaded_objects_frozen
from chairlift_lab.common.floor import Ceilings, ModelCost, ceilings_for, floor_seconds
from chairlift_lab.common.model_shapes import config_file
from chairlift_lab.common.step_work import linear_bytes, mixtures_of, products, total

VOCABULARY = 10_001  # token ids of prompts
WARM_UP_REQUESTS, WARM_UP_TOKENS = 256, 6  # at most; enough steps for graphs to be captured


@dataclass(frozen=True, slots=True)
class ShapeCase:
    name: str
    prompts: list[list[int]]
    outputs: list[int]


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    floor_seconds: float
    steps: int
    device_seconds: float  # busy time of the device, by its own clock
    host_seconds: float  # scheduling, packing and applying

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def share_of_floor(self) -> float:
        return self.floor_seconds / self.seconds

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second, "share_of_floor": self.share_of_floor}


@dataclass(frozen=True, slots=True)
class ShapeRun:
    results: list[CaseResult]
    ceilings: Ceilings
    ready_seconds: float  # until the first token, after importing torch
    vocabulary: int  # number of token ids that prompts are drawn from


def make_cases(names: Sequence[str], vocab: int, scale: int = 1) -> list[ShapeCase]:
    """Requests for the cases by name; `scale` divides all lengths.

    decode-N: N requests of 128 + 256 tokens. load-N: N requests of 100 to 1,024 tokens each way, all at once.
    prefill-N: N prompts of 2,048 tokens with one output token each.

    load-N-SEED: other lengths. With a vocabulary of `VOCABULARY` and scale 1, load-256, load-256-1 and load-1024-3 are
    the requests of a workload that is in public use (nano-vllm's benchmark), token by token.
    """
    return [_make_case(name, vocab, scale) for name in names]


def _make_case(name: str, vocab: int, scale: int) -> ShapeCase:
    found = re.fullmatch(r"(decode|prefill)-([1-9]\d*)|(load)-([1-9]\d*)(?:-(\d+))?", name)
    if found is None:
        raise InvalidParameter("cases", f"unknown case {name!r}; choose from decode-N, load-N[-SEED], prefill-N")
    kind, count = found[1] or found[3], int(found[2] or found[4])
    # One engine runs all cases: a prompt of one must not be cached for another.
    rng = random.Random(int(found[5] or 0) if kind == "load" else name)
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


def run_shape(
    shape: str,
    config: EngineConfig,
    cases: Sequence[str],
    note: Note,
    *,
    scale: int = 1,
    layers: int | None = None,
) -> ShapeRun:
    begun = time.perf_counter()
    note("starting")
    with config_file(shape, layers=layers) as path:
        started = load_engine(path, config, progress=False)
    model = started.runner.model
    run_case(started.engine, ShapeCase("first", [[1]], [1]), None, None)
    ready = time.perf_counter() - begun
    note("capturing graphs")
    started.runner.capture_decodes()
    note("measuring the ceilings")
    ceilings = ceilings_for(model)
    cost = model_cost(started)
    vocabulary = min(VOCABULARY, model.vocab_size)
    results = []
    for case in make_cases(cases, vocabulary, scale):
        run_case(started.engine, warm_up_of(case), None, None)
        started.runner.capture_missed()  # as a server does while idle
        note(f"{case.name}: {len(case.prompts)} requests")
        with loaded_objects_frozen():  # as in the server
            results.append(run_case(started.engine, case, cost, ceilings))
    return ShapeRun(results, ceilings, ready, vocabulary)


def model_cost(started: StartedEngine) -> ModelCost:
    model, keys = started.runner.model, started.runner.storage.keys
    dtype = keys[0].dtype if keys else model.dtype
    windows: dict[int, int] = {}
    for layer in model.attention_layers:
        window = layer.window or layer.chunk  # of a chunk at most so many are read
        if window:
            windows[window] = windows.get(window, 0) + bytes_per_token([layer], dtype)
    moved: dict[str, Any] = {
        "kv_bytes": bytes_per_token(model.attention_layers, dtype),
        "window_bytes": windows,
        "state_bytes": sum(layer.num_bytes for layer in model.recurrent_layers),
    }
    if not isinstance(model, Decoder):
        weights = model.num_weight_bytes()
        return ModelCost(weights, 2 * (weights // model.dtype.itemsize), **moved)
    # An embedding lookup reads one row; a head that shares the matrix reads all of it.
    step, prompt_token = total(products(model, 1, sampled=1)), total(products(model, 1, sampled=0))
    mixtures = mixtures_of(model)
    others = step.bytes + linear_bytes(model.head) - sum(mixture.read_bytes(1) for mixture in mixtures)
    return ModelCost(round(others), int(prompt_token.flops), **moved, mixtures=mixtures)


def run_case(engine: Engine, case: ShapeCase, cost: ModelCost | None, ceilings: Ceilings | None) -> CaseResult:
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False) for count in case.outputs
    ]
    begun = time.perf_counter()
    for prompt, wanted in zip(case.prompts, params, strict=True):
        engine.submit(prompt, wanted)
    tokens = steps = 0
    on_device = on_host = 0.0
    for event in _events(engine):
        if isinstance(event, TokenProduced):
            tokens += 1
        elif isinstance(event, StepDone):
            steps += 1
            on_device += event.timing.forward + event.timing.sample
            on_host += event.schedule_seconds + event.apply_seconds + event.timing.build
    seconds = time.perf_counter() - begun
    engine.check_alive()
    lengths = [len(prompt) for prompt in case.prompts]
    least = floor_seconds(lengths, case.outputs, cost, ceilings) if cost and ceilings else 0.0
    return CaseResult(case.name, len(case.prompts), sum(lengths), tokens, seconds, least, steps, on_device, on_host)


def _events(engine: Engine) -> Iterator[object]:
    while engine.has_work:
        yield from engine.step()
