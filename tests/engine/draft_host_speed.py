"""Measures the host's share of a GPU step with drafts: `python -m tests.engine.draft_host_speed [REQUESTS ...]`.

Kernels are not run. All requests decode, each with six draft tokens of which two are right; each figure is the 20th
percentile of about 60 steps. With `--profile`, the functions that take longest follow.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import torch

from chairlift.attention.backends.base import AttentionBackend, BatchSpec
from chairlift.attention.storage import KVStorage
from chairlift.core.budgets.base import FixedBudget
from chairlift.core.events import StepDone
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.policies.base import ContinuousPolicy
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.kernels.graphs import Graph, Graphs
from chairlift.models.base import CausalLM
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import StepSizes
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.control.payoff import DraftPayoff
from chairlift.speculation.draft_models import HeadNetwork
from chairlift.speculation.draft_passes import ComputedDrafts, DraftShape
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.text.tokenizer import Tokenizer
from tests.engine.host_speed import BLOCK_SIZE, VOCAB, submit, without_kernels
from tests.text import backends

PLACES = 6


class AlwaysPays(DraftPayoff):
    """Allows drafts in all steps."""

    def allows_drafts(self, num_requests: int) -> bool:
        return True


class Replayed:
    """Stands for a captured graph."""

    def replay(self) -> None:
        pass


def capture(graphs: Graphs[DraftShape, ComputedDrafts], shape: DraftShape) -> Graph[ComputedDrafts]:
    found = torch.zeros(2, PLACES, shape.padded_requests, dtype=torch.int32)
    found[0, :2] = 5
    found[1] = 9
    return Graph(Replayed(), ComputedDrafts(found))


def make_engine(requests: int) -> Engine:
    model: Any = SimpleNamespace(
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        hidden_size=1,
        attention_layers=(),
        dtype=torch.float32,
        taps=(),
        has_own_threads=False,
    )
    attention = cast(
        AttentionBackend,
        SimpleNamespace(
            batch_spec=lambda layers, dtype: BatchSpec(16, 8192, lambda rows: False),
            has_own_threads=False,
            capabilities=SimpleNamespace(has_work=False, own_threads=False),
        ),
    )
    storage = cast(KVStorage, SimpleNamespace(block_size=BLOCK_SIZE, clear=lambda layer, slots: None, keys=()))
    head: Any = SimpleNamespace(
        token_ids=torch.arange(VOCAB), feature_size=3, fused_head=None, target=model,
        attention_layers=(SimpleNamespace(index=0),),
    )  # fmt: skip
    proposer = DraftModelProposer("head", HeadNetwork(head), attention, storage, cast(CausalLM, model), repeatable=True)
    Graphs._record = capture  # type: ignore[assignment]
    sizes = StepSizes(requests, tokens=8192, context=4096, drafts=256, drafts_per_request=PLACES)
    runner = without_kernels(GPURunner(cast(CausalLM, model), attention, storage, sizes, drafter=proposer))
    proposer.attach(runner.slots, PLACES, lambda taken: True)  # as on a GPU, where passes are captured
    passes = proposer.graphs
    assert passes is not None
    cast(Any, passes)._prepare = lambda shape: 0
    passes.capture_all(passes.likely)
    kv = KVCache(num_blocks=requests * 100, block_size=BLOCK_SIZE)
    speculation = SpeculationController(proposer, draft_length=PLACES, max_drafts=256)
    speculation.payoff, speculation.may_pause = AlwaysPays(), True
    scheduler = Scheduler(
        kv, FixedBudget.of(8192 + requests, 8192), ContinuousPolicy(), requests, speculation=speculation
    )
    tokenizer = Tokenizer(backends.byte_level())
    return Engine(scheduler, runner, tokenizer, vocab_size=VOCAB, max_model_len=4096, seed=1)


def measure(requests: int, profile: cProfile.Profile | None) -> str:
    engine = make_engine(requests)
    submit(engine, requests, 0.0)
    parts: dict[str, list[float]] = {"step": [], "schedule": [], "launch": [], "apply": []}
    for _ in range(3):
        engine.step()
    if profile is not None:
        profile.enable()
    while engine.has_work:
        begun = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - begun
        for done in events:
            if isinstance(done, StepDone) and done.plan.num_drafts >= 2 * requests == 2 * done.requests:
                found = seconds, done.schedule_seconds, done.timing.build, done.apply_seconds
                for name, value in zip(parts, found, strict=True):
                    parts[name].append(value)
    if profile is not None:
        profile.disable()
    assert engine.fatal is None, engine.fatal
    typical = {name: sorted(values)[len(values) // 5] for name, values in parts.items()}
    figures = ", ".join(f"{name} {1e3 * value:.3f} ms" for name, value in typical.items())
    return f"{requests:5} requests: {figures}; {1e6 * typical['step'] / requests:.1f} us per request"


def main() -> None:
    torch.set_num_threads(1)
    sizes = [int(one) for one in sys.argv[1:] if one != "--profile"] or [1, 8, 32]
    for requests in sizes:
        profile = cProfile.Profile() if "--profile" in sys.argv else None
        print(measure(requests, profile), flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
