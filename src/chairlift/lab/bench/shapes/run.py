"""How fast a model of some shape runs, with random weights: alone, in batches, under load, and on prompts only."""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chairlift.config import EngineConfig
from chairlift.core.events import StepDone, TokenProduced
from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import StartedEngine, load_engine
from chairlift.errors import InvalidParameter
from chairlift.lab.common.floor import Ceilings, ModelCost, ceilings_for, floor_seconds
from chairlift.lab.common.plots import save_panels
from chairlift.lab.common.step_work import linear_bytes, products, total
from chairlift.lab.common.timing import Note
from chairlift.models.decoder import Decoder
from chairlift.server.gc_tuning import loaded_objects_frozen

VOCABULARY = 10_001  # tokens that prompts are drawn from
WARM_UP_REQUESTS, WARM_UP_TOKENS = 256, 6  # at most; enough for a step to be met often enough to be captured

# Public models, by what their config.json says of their shape.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "llama3-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128009,
        "torch_dtype": "bfloat16",
    },
}


@dataclass(frozen=True, slots=True)
class Case:
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
    device_seconds: float  # in which the device was at work, by its own clock
    host_seconds: float  # in which we planned, packed and applied

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
    ready_seconds: float  # until the first token, torch imported
    vocabulary: int  # prompts are drawn from its first so many tokens


def plot_shapes(
    path: Path,
    title: str,
    results: Sequence[CaseResult],
    footnote: str,
    times: tuple[str, Sequence[float]] | None = None,
) -> None:
    """`times`: another engine's name, and how many times as fast as that one we were in each case."""

    def share(axes: Any) -> None:
        axes.set_title("Share of the floor reached")
        axes.set_ylabel("%")
        bars = axes.bar([result.name for result in results], [100 * result.share_of_floor for result in results])
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_ylim(0, 100)
        axes.tick_params(axis="x", rotation=30)

    def per_step(axes: Any) -> None:
        axes.set_title("Milliseconds per step")
        names = [result.name for result in results]
        for label, shift, pick in (("measured", -0.2, "seconds"), ("floor", 0.2, "floor_seconds")):
            values = [1e3 * getattr(result, pick) / result.steps for result in results]
            places = [index + shift for index in range(len(names))]
            axes.bar_label(axes.bar(places, values, 0.4, label=label), fmt="%.3g", fontsize=8)
        axes.set_xticks(range(len(names)), names, rotation=30)
        axes.set_yscale("log")
        axes.legend(fontsize=8)

    def beside_peer(axes: Any) -> None:
        assert times is not None
        axes.set_title(f"Tokens/s, as a multiple of {times[0]}'s")
        axes.bar_label(axes.bar([result.name for result in results], times[1]), fmt="%.2f", fontsize=8)
        axes.axhline(1, color="grey", linewidth=1)
        axes.tick_params(axis="x", rotation=30)

    save_panels(path, title, footnote, [share, per_step] if times is None else [share, per_step, beside_peer])


def make_cases(names: Sequence[str], vocab: int, scale: int = 1) -> list[Case]:
    """decode-N: N requests of 128 + 256 tokens. load-N: N requests of 100 to 1,024 tokens each way, all at once.
    prefill-N: N prompts of 2,048 tokens, one token out of each. `scale` divides all lengths.

    load-N-SEED: other lengths. With a vocabulary of `VOCABULARY` and scale 1, load-256, load-256-1 and load-1024-3 are
    the requests of a workload that is in public use (nano-vllm's benchmark), token by token.
    """
    return [_make_case(name, vocab, scale) for name in names]


def _make_case(name: str, vocab: int, scale: int) -> Case:
    found = re.fullmatch(r"(decode|prefill)-([1-9]\d*)|(load)-([1-9]\d*)(?:-(\d+))?", name)
    if found is None:
        raise InvalidParameter("cases", f"unknown case {name!r}; choose from decode-N, load-N[-SEED], prefill-N")
    kind, count = found[1] or found[3], int(found[2] or found[4])
    # Cases are run by the same engine: a prompt of one must not be cached when it comes in another.
    rng = random.Random(int(found[5] or 0) if kind == "load" else name)
    spans = {"decode": ((128, 128), (256, 256)), "load": ((100, 1024), (100, 1024)), "prefill": ((2048, 2048), (1, 1))}
    (low_in, high_in), (low_out, high_out) = (tuple(max(1, limit // scale) for limit in span) for span in spans[kind])
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(low_in, high_in))] for _ in range(count)]
    return Case(name, prompts, [rng.randint(low_out, high_out) for _ in range(count)])


def warm_up_of(case: Case) -> Case:
    """Prompts as long as those of the case, but others, so that none of its prefixes is cached; and some tokens each:
    what is compiled, captured or allocated on first use is no part of the figures."""
    prompts = [prompt[::-1] for prompt in case.prompts[:WARM_UP_REQUESTS]]
    return Case("warm-up", prompts, [min(WARM_UP_TOKENS, count) for count in case.outputs[:WARM_UP_REQUESTS]])


def run_shape(shape: str, config: EngineConfig, cases: Sequence[str], note: Note, *, scale: int = 1) -> ShapeRun:
    begun = time.perf_counter()
    note("starting")
    with config_file(shape) as path:
        started = load_engine(path, config, progress=False)
    model = started.runner.model
    run_case(started.engine, Case("first", [[1]], [1]), None, None)
    ready = time.perf_counter() - begun
    note("capturing graphs")
    started.runner.capture_decodes()
    note("measuring what the device can do")
    ceilings = ceilings_for(model)
    cost = model_cost(started)
    vocabulary = min(VOCABULARY, model.vocab_size)
    results = []
    for case in make_cases(cases, vocabulary, scale):
        run_case(started.engine, warm_up_of(case), None, None)
        note(f"{case.name}: {len(case.prompts)} requests")
        with loaded_objects_frozen():  # as in the server
            results.append(run_case(started.engine, case, cost, ceilings))
    return ShapeRun(results, ceilings, ready, vocabulary)


@contextmanager
def config_file(shape: str, parameter: str = "shape") -> Iterator[str]:
    """A shape by name as a file, or a path as it is."""
    if shape not in SHAPES:
        if not Path(shape).exists():
            raise InvalidParameter(parameter, f"{shape!r} is no file; name one of {', '.join(SHAPES)}")
        yield shape
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(SHAPES[shape]))
        yield str(path)


def model_cost(started: StartedEngine) -> ModelCost:
    model = started.runner.model
    kv_bytes = bytes_per_token(model.attention_layers, started.runner.storage.keys[0].dtype)
    if not isinstance(model, Decoder):
        weights = model.num_weight_bytes()
        return ModelCost(weights, 2 * (weights // model.dtype.itemsize), kv_bytes)
    # Looking up an embedding reads one row of it; a head that shares it reads all of it.
    step, prompt_token = total(products(model, 1, sampled=1)), total(products(model, 1, sampled=0))
    return ModelCost(int(step.bytes) + linear_bytes(model.head), int(prompt_token.flops), kv_bytes)


def run_case(engine: Engine, case: Case, cost: ModelCost | None, ceilings: Ceilings | None) -> CaseResult:
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
