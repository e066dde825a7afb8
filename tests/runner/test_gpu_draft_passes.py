"""Drafts by one replayed graph equal those of passes that are launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel
from chairlift.kernels import graphs as gpu_graphs
from chairlift.kernels.graphs import Graphs, StepKernels
from chairlift.kernels.triton.drafts import draft_inputs
from chairlift.kernels.triton.sampling import likeliest
from chairlift.models.decoder import Decoder
from chairlift.runner.gpu import runner as gpu_runner
from chairlift.runner.gpu import shapes as gpu_shapes
from chairlift.speculation.draft_passes import DraftPasses, DraftShape
from chairlift.speculation.drafter import DraftTask
from chairlift.speculation.head_layers import EPS, unit
from chairlift.speculation.proposers.base import LEVELS
from tests.runner.gpu_speculation import GREEDY, plain, start, work_of, write_random_head
from tests.runner.test_gpu_graphs import record, runner_of
from tests.runner.test_gpu_speculation import drafts_of
from tests.speculation.drafting import draft_by_pattern
from tests.speculation.running import assert_same_output, drafter_of

pytestmark = pytest.mark.usefixtures("paged_backend")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Capture everything when it first occurs; without a GPU, with a fake CUDA graph."""
    monkeypatch.setattr(gpu_shapes, "MIXED_BUCKETS", [16, 32])
    monkeypatch.setattr(gpu_graphs, "CAPTURE_AFTER", 1)
    monkeypatch.setattr(gpu_graphs, "KEPT_FREE", 0)
    if device.type == "cpu":
        monkeypatch.setattr(gpu_runner, "can_capture", lambda device: True)
        monkeypatch.setattr(Graphs, "_record", record)
    else:
        is_ready = StepKernels.is_ready

        def waited(kernels: StepKernels[Any], shape: Any) -> bool:
            kernels.wait([shape])
            return is_ready(kernels, shape)

        monkeypatch.setattr(StepKernels, "is_ready", waited)


def passes_of(engine: Engine) -> DraftPasses:
    passes = drafter_of(engine)._passes
    assert passes is not None
    return passes


def captured_requests(engine: Engine) -> set[int]:
    return {shape.requests for shape, graph in passes_of(engine).graphs._captured.items() if graph is not None}


def compare(tiny: LoadedModel, speculate: str, work: Any, pattern: Any, **options: Any) -> Engine:
    """Run with graphs and kernel by kernel; return the engine with graphs."""
    found = []
    for graphs in (False, True):
        engine = start(tiny, speculate=speculate, draft_graphs=graphs, max_prefill_tokens=6, **options)
        assert (runner_of(engine).drafter.graphs is not None) == graphs
        draft_by_pattern(engine.scheduler.speculation, pattern)
        found.append(drafts_of(engine, work))
    (expected, eager), (run, replayed) = found
    assert_same_output(plain(tiny, work), run)
    assert_same_output(expected, run)
    assert replayed == eager
    assert any(len(some) > 1 for some in replayed.values())
    return engine


@pytest.mark.slow
def test_a_head_drafts_the_same_by_a_graph(tiny: LoadedModel, tmp_path: Path, captures: None) -> None:
    """Requests begin and end at different steps; a pause leaves more tokens to compute than a graph has rows for."""
    assert isinstance(tiny.model, Decoder)
    speculate = f"draft:{write_random_head(tmp_path, tiny.model)}"
    work = work_of(GREEDY.clone(max_tokens=18), GREEDY.clone(max_tokens=6))
    engine = compare(tiny, speculate, work, lambda step: step < 4 or step > 14, draft_length=3)
    assert captured_requests(engine) == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("network", ["model", "layers:1"])
def test_a_model_drafts_the_same_by_a_graph(tiny: LoadedModel, folder: Path, network: str, captures: None) -> None:
    speculate = f"draft:{folder}" if network == "model" else network
    work = work_of(*[GREEDY.clone(max_tokens=count) for count in (10, 6)])
    engine = compare(tiny, speculate, work, lambda step: step % 7 < 5, draft_length=3)
    assert captured_requests(engine) == {1, 2}


@pytest.mark.slow
def test_sampled_drafts_are_not_replayed(tiny: LoadedModel, folder: Path, captures: None) -> None:
    """Each of their tokens is drawn by the host before the next pass."""
    work = work_of(GREEDY, SamplingParams(temperature=1.0, max_tokens=7, ignore_eos=True))
    engine = start(tiny, speculate=f"draft:{folder}", seed=None, draft_graphs=True)
    replayed: list[Sequence[DraftTask]] = []
    draft = DraftPasses.draft

    def recorded(passes: DraftPasses, tasks: Sequence[DraftTask]) -> Any:
        replayed.append(tasks)
        return draft(passes, tasks)

    passes = passes_of(engine)
    passes.draft = recorded.__get__(passes)  # type: ignore[method-assign]
    found, _ = drafts_of(engine, work)
    assert found.accepted > 3
    assert all(task.request.params.temperature == 0 for tasks in replayed for task in tasks)


def test_graphs_of_drafts_are_captured_in_idle_time(tiny: LoadedModel, tmp_path: Path, captures: None) -> None:
    if tiny.model.device.type == "cuda":
        pytest.skip("in idle time kernels are compiled first")
    assert isinstance(tiny.model, Decoder)
    engine = start(
        tiny, speculate=f"draft:{write_random_head(tmp_path, tiny.model)}", draft_length=2, draft_graphs=True
    )
    graphs = passes_of(engine).graphs
    steps = runner_of(engine).preparation.graphs
    assert steps is not None
    steps._full = True  # nothing to do for steps
    graphs._captured.clear()
    assert [engine.prepare(), list(graphs._captured)] == [True, [DraftShape(1, 2)]]
    engine.submit([3, 4], GREEDY)
    assert not engine.prepare(), "a request waits"
    assert len(graphs._captured) == 1


def test_no_graph_takes_the_memory_of_the_largest_step(
    tiny: LoadedModel, tmp_path: Path, captures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(tiny.model, Decoder)
    monkeypatch.setattr(gpu_runner, "has_room", lambda device, step_bytes, taken: False)
    engine = start(
        tiny, speculate=f"draft:{write_random_head(tmp_path, tiny.model)}", draft_length=2, draft_graphs=True
    )
    passes = passes_of(engine)
    assert [passes.draft([None]), passes.is_typical(1)] == [None, True]  # type: ignore[list-item]


@pytest.mark.parametrize("vocab", [7, 300, 9000])
def test_likeliest_tokens(vocab: int, device: torch.device) -> None:
    scores = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0)) * 4
    scores[1] = scores[1, 0]  # the first of several that tie
    scores[2, 3] = 50.0
    scores[3] = float("nan")
    ids = torch.randperm(2 * vocab)[:vocab]
    tokens, levels = torch.full((2, 5), -7, dtype=torch.int32, device=device)
    likeliest(scores.to(device), ids.to(device), tokens, levels, LEVELS)
    best = scores.argmax(dim=1)
    chances = scores.softmax(dim=1).amax(dim=1)
    sound = [0, 1, 2, 4]
    assert tokens[sound].tolist() == ids[best[sound]].tolist()
    assert levels[sound].tolist() == (chances[sound] * LEVELS).long().clamp(max=LEVELS - 1).tolist()
    assert tokens[3].item() in ids.tolist()
    assert levels[3].item() == 0


def test_inputs_of_a_head(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    table, states = (torch.randn(rows, 96, generator=generator).to(device) for rows in (40, 5))
    tokens = torch.tensor([3, 0, 39, 3, 7], device=device)
    found = draft_inputs(tokens, table, 1.5, states, EPS)
    expected = torch.cat((unit(table[tokens] * 1.5), unit(states)), dim=-1)
    torch.testing.assert_close(found, expected)
