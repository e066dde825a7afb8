"""How long running requests stall while one very long prompt arrives, over chunk sizes and without chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.settings import resolve_machine
from chairlift.engine.startup import LoadedModel
from chairlift.models.dummy import dummy_tokenizer
from chairlift.progress import Note
from chairlift_lab.bench.chunking.long_prompts import engine_for_long_prompts, run_long_prompts
from chairlift_lab.bench.chunking.options import ChunkingSettings
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.random_model import random_llama

CHUNKS = (128, 256, 512, 1024, 2048, 4096)
WARM_UP = 256  # tokens of a prompt that comes first and does not count


@dataclass(frozen=True, slots=True)
class StallPoint:
    """One chunk size, or None: the whole prompt in one step. Times are seconds."""

    chunk: int | None
    worst_gap: float  # between two tokens of a request that was generating
    median_gap: float
    first_token: float  # of the long prompt

    def row(self) -> dict[str, Any]:
        return {
            "name": "no chunks" if self.chunk is None else f"chunk {self.chunk}",
            "chunk": self.chunk,
            "itl_max_ms": self.worst_gap * 1e3,
            "itl_p50_ms": self.median_gap * 1e3,
            "ttft_ms": self.first_token * 1e3,
        }


def random_maker(device: str = "auto", dtype: str = "auto") -> EngineMaker:
    """Engines around a small random model with a context long enough."""
    config = EngineConfig(device=device, dtype=dtype)
    machine = resolve_machine(config)
    model = random_llama(machine.device, machine.dtype)
    loaded = LoadedModel("a small random Llama", model, dummy_tokenizer(), frozenset())
    return EngineMaker(loaded, {"device": device, "dtype": dtype})


def measure_stalls(
    maker: EngineMaker,
    *,
    prompt_len: int = 10_000,
    chunks: Sequence[int] = CHUNKS,
    decodes: int = 8,
    note: Note = lambda text: None,
) -> list[StallPoint]:
    """The prompt in one step first, then in chunks; `decodes` requests generate all the while."""
    settings = ChunkingSettings(decodes=decodes, prompts=1, prompt_len=prompt_len)
    points = []
    for chunk in (None, *chunks):
        note("no chunks" if chunk is None else f"chunks of {chunk} tokens")
        size = chunk or prompt_len
        engine = engine_for_long_prompts(maker, settings, max_batch_tokens=size, max_prefill_tokens=size)
        run = run_long_prompts(engine, maker.vocabulary(), settings, warm_up=WARM_UP)
        median = sorted(run.gaps)[len(run.gaps) // 2]
        points.append(StallPoint(chunk, max(run.gaps), median, run.first_tokens[0]))
    return points
