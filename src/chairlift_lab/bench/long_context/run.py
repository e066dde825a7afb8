"""One long prompt at a time: prefill time, memory, and time per output token after it."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from chairlift.attention.backends.base import AttentionBackend
from chairlift.core.events import StepDone, TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import StartedEngine
from chairlift.errors import InvalidParameter
from chairlift.models.decoder import Decoder
from chairlift.progress import Note
from chairlift_lab.bench.kernels.run import attention_case, device_seconds
from chairlift_lab.bench.shapes.run import WARM_UP_TOKENS, model_cost
from chairlift_lab.common.engines import touch_cache
from chairlift_lab.common.floor import Ceilings, ModelCost
from chairlift_lab.common.model_shapes import read_json_config
from chairlift_lab.common.step_work import attention_work, total
from chairlift_lab.common.timing import peak_bytes


@dataclass(frozen=True, slots=True)
class LongContextSettings:
    lengths: Sequence[int] = (8192, 32768, 131072)
    output_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2:
            raise InvalidParameter("lengths", f"needs numbers of at least 2, got {list(self.lengths)}")
        if self.output_tokens < 2:
            raise InvalidParameter("output_tokens", f"must be at least 2, got {self.output_tokens}")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(self.lengths) + self.output_tokens


@dataclass(frozen=True, slots=True)
class LongContextPoint:
    tokens: int  # prompt tokens
    chunks: int  # prefill steps
    prefill_seconds: float  # until the first token
    prefill_floor_seconds: float  # of the arithmetic, with attention
    kv_bytes: int  # keys and values of the prompt
    peak_bytes: int | None  # peak beyond weights and cache; None if unknown
    tpot_seconds: float  # for each token after the first
    tpot_floor_seconds: float  # weights and cache over the bandwidth
    kv_floor_seconds: float  # the cache alone
    attention_seconds: float | None  # one layer, one token; None for models that run on transformers
    attention_floor_seconds: float  # its keys and values over the bandwidth

    @property
    def prefill_share_of_floor(self) -> float:
        return self.prefill_floor_seconds / self.prefill_seconds

    @property
    def tpot_share_of_floor(self) -> float:
        return self.tpot_floor_seconds / self.tpot_seconds

    @property
    def kv_times_floor(self) -> float:
        """An upper bound: the whole step except the reading of weights, over the floor of the KV cache."""
        return (self.tpot_seconds - self.tpot_floor_seconds) / self.kv_floor_seconds + 1

    @property
    def attention_times_floor(self) -> float | None:
        return None if self.attention_seconds is None else self.attention_seconds / self.attention_floor_seconds

    def row(self) -> dict[str, Any]:
        return asdict(self) | {
            "name": f"{self.tokens} tokens",
            "prefill_share_of_floor": self.prefill_share_of_floor,
            "tpot_share_of_floor": self.tpot_share_of_floor,
            "kv_times_floor": self.kv_times_floor,
            "attention_times_floor": self.attention_times_floor,
        }


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
) -> list[LongContextPoint]:
    """Random prompts, one after the other, each computed in chunks of the token budget."""
    touch_cache(started.runner.storage)
    rng = random.Random(settings.seed)
    note("warm-up")  # compile and capture before the measurement
    _run(started.engine, min(settings.lengths), WARM_UP_TOKENS, rng)
    return [_measure(started, ceilings, length, settings.output_tokens, rng, note) for length in settings.lengths]


@dataclass(frozen=True, slots=True)
class _Run:
    chunks: int
    first: float  # seconds until the first token
    last: float


def _run(engine: Engine, length: int, output: int, rng: random.Random) -> _Run:
    prompt = [rng.randrange(engine.vocab_size) for _ in range(length)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output, detokenize=False)
    begun = time.perf_counter()
    engine.submit(prompt, params)
    engine.expect_no_more()
    chunks, times = 0, []
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - begun
        chunks += sum(isinstance(event, StepDone) and event.prefill_tokens > 0 for event in events)
        times += [now for event in events if isinstance(event, TokenProduced)]
    engine.check_alive()
    return _Run(chunks, times[0], times[-1])


def _measure(
    started: StartedEngine, ceilings: Ceilings, length: int, output: int, rng: random.Random, note: Note
) -> LongContextPoint:
    note(f"{length:,} tokens")
    runs: list[_Run] = []
    model, storage = started.runner.model, started.runner.storage
    peak = peak_bytes(lambda: runs.append(_run(started.engine, length, output, rng)), model.device)
    (run,) = runs
    cost = model_cost(started)
    # The tokens after the first see the prompt and, on average, half of the output.
    context = length + output // 2
    read_kv = cost.read_bytes(context, context)
    note(f"attention to {length:,} tokens")
    attention, read = None, 0.0
    if isinstance(model, Decoder):
        attention, read = _one_token(model, started.runner.attention, storage.keys[0].dtype, length)
    return LongContextPoint(
        tokens=length,
        chunks=run.chunks,
        prefill_seconds=run.first,
        prefill_floor_seconds=_prompt_flops(started, cost, length) / ceilings.flops_per_second,
        kv_bytes=length * cost.kv_bytes,
        peak_bytes=peak,
        tpot_seconds=(run.last - run.first) / (output - 1),
        tpot_floor_seconds=(cost.weight_bytes(1) + read_kv + 2 * cost.state_bytes) / ceilings.bytes_per_second,
        kv_floor_seconds=read_kv / ceilings.bytes_per_second,
        attention_seconds=attention,
        attention_floor_seconds=read / ceilings.bytes_per_second,
    )


def _prompt_flops(started: StartedEngine, cost: ModelCost, length: int) -> float:
    layers = started.runner.model.attention_layers
    return length * cost.token_flops + total(attention_work(layer, [(0, length)], 1) for layer in layers).flops


@torch.inference_mode()
def _one_token(model: Decoder, backend: AttentionBackend, kv_dtype: torch.dtype, length: int) -> tuple[float, float]:
    """Seconds and bytes of one layer's attention for a token with a context of `length`.

    Layers without a sliding window are used if there are any.
    """
    layers = [layer for layer in model.attention_layers if layer.window is None] or list(model.attention_layers)
    case = attention_case(model, layers, kv_dtype, backend, [(length - 1, 1)], "decode", f"{length:,} tokens")
    return device_seconds(case.run, model.device) / case.calls, case.work.bytes
