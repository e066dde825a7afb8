"""One long prompt at a time: prefill time, memory, and time per output token after it."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import Measurement, serve_at_once, touch_cache
from chairlift_lab.common.floor import Ceilings, ModelCost
from chairlift_lab.common.kernel_cases import attention_case, device_seconds
from chairlift_lab.common.model_shapes import (
    WARM_UP_TOKENS,
    ShapeOptions,
    ceilings_line,
    model_settings,
    read_json_config,
)
from chairlift_lab.common.timing import growth, in_inference_mode, peak_bytes
from chairlift_lab.report.options import Settings, each, number_list

if TYPE_CHECKING:
    import torch

    from chairlift.attention.backends.base import AttentionBackend
    from chairlift.engine.engine import Engine
    from chairlift.engine.startup import StartedEngine
    from chairlift.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LongContextSettings(Settings):
    lengths: Annotated[Sequence[int], each(at_least(2)), number_list("Prompt tokens.")] = (512, 2048, 8000)
    output_tokens: Annotated[int, at_least(2), typer.Option(help="Tokens generated after each prompt.")] = 64

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(self.lengths) + self.output_tokens


@contextmanager
def made_longer(path: str, tokens: int) -> Iterator[str]:
    """A copy of a config.json that allows `tokens` positions; random weights have no trained limit."""
    config = read_json_config(Path(path), "model")
    longer = config | {"max_position_embeddings": max(tokens, config.get("max_position_embeddings", 0))}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "config.json"
        target.write_text(json.dumps(longer), encoding="utf-8")
        yield str(target)


def measure_long_contexts(
    started: StartedEngine, ceilings: Ceilings, settings: LongContextSettings, note: Note = lambda text: None
) -> list[dict[str, Any]]:
    """Random prompts, one after the other, each computed in chunks of the token budget."""
    touch_cache(started.runner.storage)
    rng = random.Random(0)
    note("warm-up")  # compile and capture before the measurement
    _serve_one(started.engine, min(settings.lengths), WARM_UP_TOKENS, rng)
    return [_measure(started, ceilings, length, settings.output_tokens, rng, note) for length in settings.lengths]


def _serve_one(engine: Engine, length: int, output: int, rng: random.Random) -> Measurement:
    return serve_at_once(engine, [[rng.randrange(engine.vocab_size) for _ in range(length)]], [output])


def _measure(
    started: StartedEngine, ceilings: Ceilings, length: int, output: int, rng: random.Random, note: Note
) -> dict[str, Any]:
    from chairlift.models.decoder import Decoder
    from chairlift_lab.common.floor import model_cost

    note(f"{length:,} tokens")
    runs: list[Measurement] = []
    model, storage = started.runner.model, started.runner.storage
    peak = peak_bytes(lambda: runs.append(_serve_one(started.engine, length, output, rng)), model.device)
    (run,) = runs
    (times,) = run.token_times
    cost = model_cost(started)
    # The tokens after the first see the prompt and, on average, half of the output.
    context = length + output // 2
    read_kv = cost.read_bytes(context, context)
    note(f"attention to {length:,} tokens")
    attention, read = None, 0.0  # unknown for models that run on transformers
    if isinstance(model, Decoder):
        attention, read = _one_token(model, started.runner.attention, storage.keys[0].dtype, length)
    prefill, tpot = times[0], (times[-1] - times[0]) / (output - 1)
    prefill_floor = _prompt_flops(started, cost, length) / ceilings.flops_per_second
    step_bytes = cost.weight_bytes(1) + read_kv + 2 * cost.state_bytes
    tpot_floor, kv_floor, attention_floor = (moved / ceilings.bytes_per_second for moved in (step_bytes, read_kv, read))
    return {
        "tokens": length,
        "chunks": sum(step.prefill_tokens > 0 for step in run.steps),
        "prefill_seconds": prefill,
        "prefill_floor_seconds": prefill_floor,  # the arithmetic, attention included
        "kv_bytes": length * cost.kv_bytes,
        "peak_bytes": peak,  # beyond weights and cache; None if unknown
        "tpot_seconds": tpot,
        "tpot_floor_seconds": tpot_floor,  # weights and cache over the bandwidth
        "kv_floor_seconds": kv_floor,
        "attention_seconds": attention,  # one layer, one token
        "attention_floor_seconds": attention_floor,
        "name": f"{length} tokens",
        "prefill_share_of_floor": prefill_floor / prefill,
        "tpot_share_of_floor": tpot_floor / tpot,
        # An upper bound: the whole step except the reading of weights, over the floor of the KV cache.
        "kv_times_floor": (tpot - tpot_floor) / kv_floor + 1,
        "attention_times_floor": None if attention is None else attention / attention_floor,
    }


def _prompt_flops(started: StartedEngine, cost: ModelCost, length: int) -> float:
    from chairlift_lab.common.floor import attention_work, total

    layers = started.runner.model.attention_layers
    return length * cost.token_flops + total(attention_work(layer, [(0, length)], 1) for layer in layers).flops


@in_inference_mode
def _one_token(model: Decoder, backend: AttentionBackend, kv_dtype: torch.dtype, length: int) -> tuple[float, float]:
    """Seconds and bytes of one layer's attention for a token with a context of `length`.

    Layers without a sliding window are used if there are any.
    """
    layers = [layer for layer in model.attention_layers if layer.window is None] or list(model.attention_layers)
    case = attention_case(model, layers, kv_dtype, backend, [(length - 1, 1)], "decode", f"{length:,} tokens")
    return device_seconds(case.run, model.device) / case.calls, case.work.bytes


COLUMNS = (
    Column("Prompt", "tokens", ","),
    Column("Chunks", "chunks", ","),
    Column("Prefill\ns", "prefill_seconds", ",.3f"),
    Column("Floor\ns", "prefill_floor_seconds", ",.3f"),
    Column("Of\nfloor", "prefill_share_of_floor", ".0%"),
    Column("KV cache\nMiB", "kv_bytes", ",.1f", factor=2**-20),
    Column("Peak more\nMiB", "peak_bytes", ",.1f", factor=2**-20, missing=""),
    Column("TPOT\nms", "tpot_seconds", ",.3f", factor=1e3),
    Column("Floor\nms", "tpot_floor_seconds", ",.3f", factor=1e3),
    Column("Of\nfloor", "tpot_share_of_floor", ".0%"),
    Column("KV times\nfloor, <=", "kv_times_floor", ".2f", unit="x"),
    Column("Attention\nµs/layer", "attention_seconds", ",.1f", factor=1e6, missing=""),
    Column(
        "Floor\nµs",
        lambda row: None if row["attention_seconds"] is None else row["attention_floor_seconds"],
        ",.1f",
        factor=1e6,
        missing="",
    ),
    Column("Times\nfloor", "attention_times_floor", ".2f", unit="x", missing=""),
)


@bench(
    "long-context",
    "chairlift bench long-context --lengths 1024,4096",
    "chairlift bench long-context --model-config llama3-8b --device cuda --json result.json",
)
def bench_long_context(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    note: Note,
    settings: LongContextSettings,
) -> BenchResult:
    """One long prompt at a time: prefill time, memory, and time per output token after it.

    A prompt is computed in chunks of --max-prefill-tokens. "Peak more" is the
    peak memory beyond the weights and the KV cache: ragged attention writes no
    score matrix, so it hardly grows with the prompt. "KV times floor" counts the
    whole step but the reading of weights as attention, which says little for
    short prompts. The last columns are the attention of one layer for one token,
    beside the time to read its keys and values at the bandwidth measured in the
    same run.
    """
    from chairlift.engine.settings import resolve_machine
    from chairlift.engine.startup import load_engine
    from chairlift_lab.common.floor import ceilings_for

    refuse_given(context, ("max_model_len", "max_batch_requests"), "follows from --lengths: one prompt at a time")
    refuse_given(context, ("prefix_caching",), "has no effect here: every prompt is new")
    refuse_given(context, ("speculate", "draft_length"), "the floor counts a step for every token")
    with ExitStack() as files:
        path, config, name = files.enter_context(shape.resolve(context, engine))
        if config.load_format == "dummy":
            path = files.enter_context(made_longer(path, settings.longest))
        note("loading")
        config = replace(config, max_model_len=settings.longest, max_batch_requests=1, prefix_caching=False)
        try:
            started = load_engine(path, config, progress=not engine.quiet)
        except InvalidParameter as error:
            if error.parameter != "max_model_len":
                raise
            raise InvalidParameter("lengths", error.problem) from None
        note("measuring the ceilings")
        ceilings = ceilings_for(started.runner.model)
        rows = measure_long_contexts(started, ceilings, settings, note)
    asked = asdict(settings) | {"chunk": resolve_machine(config).max_prefill_tokens}
    return BenchResult(
        asked | model_settings(name, started.runner.model, ceilings),
        rows,
        [Table(name, COLUMNS, rows, _growth_line(rows) + ceilings_line(ceilings))],
    )


def _growth_line(rows: Sequence[Mapping[str, Any]]) -> str:
    peaks = [row["peak_bytes"] for row in rows if row["peak_bytes"]]
    lengths = [row["tokens"] for row in rows]
    if len(peaks) < len(rows) or len(set(lengths)) < 2:
        return ""
    return (
        f"Memory beyond weights and KV cache grows as the prompt's length to the power {growth(lengths, peaks):.2f}.\n"
    )
