from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.events import Event, RequestFinished, RequestPreempted, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, load_model
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.loading.resolve import resolve_model
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny checkpoint."""
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def default_model() -> LoadedModel:
    return load_model(DEFAULT_MODEL, EngineConfig(device="cpu", dtype="float32"), progress=False)


@pytest.fixture(scope="session")
def hf_default() -> Any:
    """The default model in transformers. Our reader gives it its weights, since that of transformers takes 20 s;
    tests/loading/test_default_model.py compares what both read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(resolve_model(DEFAULT_MODEL, progress=False))
    config, weights = LlamaConfig(**checkpoint.config), dict(checkpoint.tensors())
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()


@dataclass
class Run:
    outputs: list[list[int]]
    events: list[Event]

    @property
    def num_preemptions(self) -> int:
        return sum(isinstance(event, RequestPreempted) for event in self.events)


def run_greedy(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> Run:
    """Run all prompts at once, checking the block accounting after every step."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    ids = [engine.submit(prompt, params)[0] for prompt in prompts]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    events: list[Event] = []
    while engine.has_work:
        for event in engine.step():
            events.append(event)
            if isinstance(event, TokenProduced):
                outputs[event.request_id].append(event.token)
        check_accounting(engine.scheduler)
    assert engine.fatal is None
    check_quiescent(engine.scheduler)
    assert sum(isinstance(event, RequestFinished) for event in events) == len(prompts)
    return Run([outputs[request_id] for request_id in ids], events)
