"""Drafts on the GPU's runner (in Triton's interpreter where there is none): nothing that comes out changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.attention import PagedGPUAttention
from chairlift.core.draft_length import FixedLength
from chairlift.core.sampling import SamplingParams
from chairlift.core.speculation import Speculation, Wanted
from chairlift.core.structure import Structure
from chairlift.execution.config import EngineConfig
from chairlift.execution.drafter import FirstLayers, Head, NetworkProposer
from chairlift.execution.engine import Engine
from chairlift.execution.gpu_runner import GPURunner
from chairlift.execution.startup import LoadedModel, load_model
from chairlift.models.decoder import Decoder
from tests.kernels.test_gpu_runner import few_splits
from tests.speculation import running
from tests.speculation.running import Run, Work, knows_better, run
from tests.speculation.test_same_output import same
from tests.tiny import write_tiny_checkpoint

__all__ = ["few_splits"]  # a fixture

GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("speculation") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path, device: torch.device) -> LoadedModel:
    return load_model(str(folder), EngineConfig(device=device.type, dtype="float32"), progress=False)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that is only chosen on a GPU, unless another is asked for."""
    chosen = "chairlift.execution.startup.choose_backend"
    from chairlift.execution.startup import choose_backend

    def choose(name: str, *rest: Any, **more: Any) -> Any:
        return PagedGPUAttention(more.get("invariant_for")) if name == "auto" else choose_backend(name, *rest, **more)

    monkeypatch.setattr(chosen, choose)


def start(tiny: LoadedModel, *given: Any, **options: Any) -> Engine:
    usual = {"device": tiny.model.device.type, "max_batch_requests": 4, "speculate": "ngram", "draft_length": 4}
    engine = running.start(tiny, *given, **usual | options)
    assert isinstance(engine.executor, GPURunner) == (options.get("attention") is None)
    return engine


def plain(tiny: LoadedModel, work: Work) -> Run:
    return run(start(tiny, attention="bursted", speculate=None, draft_length=None), work)


def work_of(*params: SamplingParams) -> Work:
    """Prompts of uneven lengths, some with a common start."""
    return [([3 + (7 * (i % 2) + j % 11) % 300 for j in range(3 + 5 * i)], one) for i, one in enumerate(params)]


def test_whatever_is_guessed_the_tokens_are_the_same(tiny: LoadedModel) -> None:
    """Arg max, draws and what the host samples, in steps with prompts, decodes and drafts."""
    work = work_of(
        GREEDY.clone(max_tokens=14),
        GREEDY.clone(temperature=0.8, top_k=20, top_p=0.9, seed=3),
        GREEDY.clone(repetition_penalty=1.4, logprobs=2),
        GREEDY.clone(temperature=1.0, logit_bias={5: 3.0}, min_tokens=3, seed=4, ignore_eos=False),
        GREEDY.clone(max_tokens=9),
    )
    expected = plain(tiny, work)
    engine = start(tiny, knows_better(expected, seed=1), length=4, max_prefill_tokens=7)
    found = run(engine, work)
    same(expected, found)
    assert found.accepted > 10
    assert found.proposed > found.accepted
    logprobs = [[one.logprobs for one in each.outcomes.values()][2] for each in (expected, found)]
    assert [one and one.rank for one in logprobs[0]] == [one and one.rank for one in logprobs[1]]
    assert [one and one.logprob for one in logprobs[0]] == pytest.approx([one and one.logprob for one in logprobs[1]])


def test_blocks_that_wrong_guesses_gave_back_are_not_read_again(tiny: LoadedModel) -> None:
    """So little memory that requests are preempted, and that the blocks of drafts change hands."""
    work = work_of(*[GREEDY.clone(max_tokens=12)] * 3)
    expected = plain(tiny, work)
    engine = start(tiny, knows_better(expected, seed=3), length=6, kv_memory="22KiB", prefix_caching=False)
    found = run(engine, work)
    same(expected, found)
    assert found.preemptions > 0
    assert found.proposed > found.accepted > 5
