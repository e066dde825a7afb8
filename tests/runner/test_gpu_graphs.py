"""Capture and replay of steps; without a GPU, with a fake CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from chairlift.core.plan import StepPlan
from chairlift.engine import runner_factory
from chairlift.engine.engine import Engine
from chairlift.engine.memory_plan import MemoryPlan
from chairlift.engine.startup import LoadedModel
from chairlift.errors import InvalidParameter
from chairlift.kernels import graphs as gpu_graphs
from chairlift.kernels.graphs import CAPTURE_AFTER, Graph, Graphs, StepKernels, has_room
from chairlift.models.decoder import Decoder
from chairlift.runner.gpu import runner as gpu_runner
from chairlift.runner.gpu import shapes as gpu_shapes
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import BatchShape
from chairlift.runner.gpu.step import ComputedStep, LaunchedStep
from chairlift.speculation.draft_models import HeadNetwork
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.speculation.head_layers import DraftHead
from chairlift.speculation.head_states import RecentStates
from chairlift_lab.bench.speculation import SpeculationSettings, compare_speculation
from chairlift_lab.common.engines import EngineMaker
from tests.runner.gpu_speculation import GREEDY, plain, start, work_of, write_random_head
from tests.speculation.running import assert_same_output, often_right, run

pytestmark = pytest.mark.usefixtures("paged_backend")

NO_OUTPUT = ComputedStep(torch.empty(0), torch.empty(0), None)
DECODES, MORE_DECODES = BatchShape(8, 8, 8, 0, 8, 8), BatchShape(16, 16, 16, 0, 16, 16)
MIXED = BatchShape(128, 4, 4, 17, 4, 8)


class ReplayedGraph:
    """Repeats the calls of a step and writes to the tensors of the first run, as a graph does."""

    count = 0

    def __init__(self, graphs: Graphs, shape: BatchShape, step: ComputedStep) -> None:
        self._again = lambda: graphs._forward(shape)
        self._step = step

    def replay(self) -> None:
        ReplayedGraph.count += 1
        _copy_into(self._step, self._again())


def _copy_into(old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif isinstance(old, tuple):
        for one, other in zip(old, new, strict=True):
            _copy_into(one, other)
    elif is_dataclass(old):
        for field in fields(old):
            _copy_into(getattr(old, field.name), getattr(new, field.name))


def record(graphs: Graphs, shape: BatchShape) -> Graph:
    step = graphs._forward(shape)
    return Graph(ReplayedGraph(graphs, shape, step), step)


def kernels(is_ready: Callable[[BatchShape], bool] = lambda shape: True) -> StepKernels[BatchShape]:
    """Kernels that are compiled, or those of some shapes."""
    return cast("StepKernels[BatchShape]", SimpleNamespace(is_ready=is_ready))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(Graphs, "_record", record)
    return Graphs(lambda shape: 5, lambda shape: NO_OUTPUT, [DECODES, MORE_DECODES], lambda taken: True, kernels())


def test_a_shape_is_captured_once_it_has_occurred_often_enough(graphs: Graphs) -> None:
    times = CAPTURE_AFTER
    for shape in (DECODES, MIXED):
        typical, found = zip(*((graphs.is_typical(shape), graphs.find(shape)) for _ in range(times + 1)), strict=True)
        assert list(typical) == [False] * times + [True]
        assert list(found)[: times - 1] == [None] * (times - 1)
        assert found[-1] is found[-2]
        assert found[-1] is not None


def test_no_shape_is_captured_before_its_kernels_are_compiled(graphs: Graphs) -> None:
    compiled = {MORE_DECODES}
    graphs._kernels = kernels(compiled.__contains__)
    assert [graphs.find(DECODES) for _ in range(2 * CAPTURE_AFTER)] == [None] * (2 * CAPTURE_AFTER)
    assert graphs.capture_next()
    assert list(graphs._captured) == [MORE_DECODES]
    assert not graphs.capture_next()
    compiled.add(DECODES)
    assert graphs.find(DECODES) is not None


def test_missed_shapes_are_captured_before_likely_ones_in_idle_time(graphs: Graphs) -> None:
    assert graphs.find(MIXED) is None
    assert graphs.missed == [MIXED]
    captured = []
    while graphs.capture_next():
        captured.append(list(graphs._captured)[-1])
    assert captured == [MIXED, DECODES, MORE_DECODES]
    assert not graphs.capture_next()
    assert all(graphs.find(shape) is not None for shape in captured)


@pytest.mark.parametrize("collects", [True, False])
def test_gc_is_disabled_while_a_step_is_captured(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing graphs of another engine would invalidate the capture."""
    collected: list[bool] = []

    def forward(shape: BatchShape) -> ComputedStep:
        collected.append(gc.isenabled())
        if shape is MIXED:
            raise torch.OutOfMemoryError
        return NO_OUTPUT

    for name in ("CUDAGraph", "current_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    graphs = Graphs(lambda shape: 5, forward, [], lambda taken: True, kernels())
    before = gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        for shape in (DECODES, MIXED):
            graphs.capture(shape)
            assert gc.isenabled() == collects
    finally:
        gc.enable() if before else gc.disable()
    assert collected == [False, False]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory")])
def test_steps_go_on_without_graphs_when_memory_runs_out(
    error: Exception, graphs: Graphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs.capture(DECODES)

    def fail(graphs: Graphs, shape: BatchShape) -> Graph:
        raise error

    monkeypatch.setattr(Graphs, "_record", fail)
    assert [graphs.find(MIXED) for _ in range(2 * CAPTURE_AFTER)] == [None] * (2 * CAPTURE_AFTER)
    assert graphs.is_typical(MORE_DECODES), "the shape is never captured"
    assert graphs.find(DECODES) is not None
    assert not graphs.capture_next()
    assert [record.message.split(":")[0] for record in caplog.records] == ["no memory is left for captured steps"]


def test_no_capture_takes_the_memory_of_the_largest_step(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds in idle time and for frequent shapes."""
    graphs.capture(DECODES)
    monkeypatch.setattr(graphs, "_has_room", lambda taken: taken < 5)
    assert [graphs.find(MORE_DECODES) for _ in range(2 * CAPTURE_AFTER)] == [None] * (2 * CAPTURE_AFTER)
    assert not graphs.capture_next()
    assert graphs.find(DECODES) is not None


def test_a_capture_needs_room_beside_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(gpu_graphs, "KEPT_FREE", 100)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    device = torch.device("cpu")
    assert [has_room(device, step, taken) for step, taken in ((800, 99), (800, 100), (899, 0), (900, 0))] == [
        *(True, False),
        *(True, False),
    ]


def runner_of(engine: Engine) -> GPURunner:
    assert isinstance(engine.executor, GPURunner)
    return engine.executor


@pytest.mark.parametrize("long", [16, 10**6])
def test_the_attention_backend_decides_which_batch_sizes_have_a_shape_for_long_contexts(
    tiny: LoadedModel, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 512)
    monkeypatch.setattr("chairlift.attention.paged.gpu.LONG_CONTEXT", long)
    runner = runner_of(start(tiny))
    rows = [64, 96, 128, 200, 600]
    found = [runner.shapes.decode(size, long=True).long for size in rows]
    spec = runner.attention.batch_spec(runner.model.attention_layers, runner.model.dtype)
    splits = [spec.splits_more(size) for size in rows]
    assert any(splits)
    assert found == (splits if long == 16 else [False] * len(rows))


def test_the_largest_step_is_measured_before_the_cache_is_sized(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_shapes, "MIXED_BUCKETS", [16])
    monkeypatch.setattr(runner_factory, "_measures_steps", lambda device: True)
    done: list[object] = []
    taken: list[int] = []  # only the 1000 without a GPU
    measure, plan_memory = GPURunner.measure_largest_step, runner_factory.plan_memory

    def measured(runner: GPURunner) -> int:
        done.append((runner.sizes.requests, len(runner.storage.keys[0])))
        taken.append(measure(runner) + 1000)
        return taken[-1]

    def planned(*layers: Any, **options: Any) -> MemoryPlan:
        done.append(options["step_bytes"])
        return plan_memory(*layers, **options)

    monkeypatch.setattr(GPURunner, "measure_largest_step", measured)
    monkeypatch.setattr(runner_factory, "plan_memory", planned)
    work = work_of(GREEDY.clone(max_tokens=3))
    engine = start(tiny, max_batch_tokens=8, speculate="layers:1", draft_length=2)
    assert done == [0, (4, 2), *taken]
    assert_same_output(plain(tiny, work), run(engine, work))

    def exhausted(runner: GPURunner) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(GPURunner, "measure_largest_step", exhausted)
    with pytest.raises(InvalidParameter, match=r"max_batch_tokens.*lower it"):
        start(tiny)


def test_memory_of_a_draft_head_is_part_of_the_largest_step(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head computes the largest step before the cache is sized, while its states have their memory."""
    assert isinstance(tiny.model, Decoder)
    monkeypatch.setattr(gpu_shapes, "MIXED_BUCKETS", [16])
    monkeypatch.setattr(runner_factory, "_measures_steps", lambda device: True)
    speculate = f"draft:{write_random_head(tmp_path, tiny.model)}"
    computed: list[int] = []
    rings: list[torch.Tensor] = []
    measure, store_keys = GPURunner.measure_largest_step, DraftHead.store_keys

    def measured(runner: GPURunner) -> int:
        monkeypatch.setattr(DraftHead, "store_keys", recorded)
        taken = measure(runner)
        monkeypatch.setattr(DraftHead, "store_keys", store_keys)
        assert computed == [runner.largest_shape.tokens]
        rings.append(recent_of(runner).ring)
        return taken

    def recorded(head: DraftHead, tokens: torch.Tensor, *given: Any) -> None:
        computed.append(len(tokens))
        store_keys(head, tokens, *given)

    monkeypatch.setattr(GPURunner, "measure_largest_step", measured)
    engine = start(tiny, max_batch_tokens=8, speculate=speculate, draft_length=2)
    rings.append(recent_of(runner_of(engine)).ring)
    assert rings[0].shape == rings[1].shape
    assert not rings[0].any(), "no state is kept for padding"
    work = work_of(GREEDY.clone(max_tokens=3))
    assert_same_output(plain(tiny, work), run(engine, work))
    assert rings[1].any()


def recent_of(runner: GPURunner) -> RecentStates:
    assert isinstance(runner.drafter, DraftModelProposer)
    network = runner.drafter.network
    assert isinstance(network, HeadNetwork)
    assert isinstance(network.states, RecentStates)
    return network.states


def test_replayed_steps_compute_the_same(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A few shapes serve all batches, filled up with padding, in steps with drafts and without."""
    monkeypatch.setattr(gpu_shapes, "MIXED_BUCKETS", [16, 32])
    monkeypatch.setattr(gpu_graphs, "CAPTURE_AFTER", 1)
    monkeypatch.setattr(gpu_graphs, "KEPT_FREE", 0)  # other processes may use the device
    if device.type == "cpu":
        monkeypatch.setattr(gpu_runner, "can_capture", lambda device: True)
        monkeypatch.setattr(Graphs, "_record", record)
        monkeypatch.setattr(ReplayedGraph, "count", 0)
    else:  # a shape is captured when it first occurs, not when its kernels happen to be compiled
        is_ready = StepKernels.is_ready

        def waited(kernels: StepKernels, shape: BatchShape) -> bool:
            kernels.wait([shape])
            return is_ready(kernels, shape)

        monkeypatch.setattr(StepKernels, "is_ready", waited)
    work = work_of(GREEDY, GREEDY.clone(temperature=0.7, seed=2), GREEDY.clone(max_tokens=5, frequency_penalty=0.5))
    expected = plain(tiny, work)
    launch = GPURunner.launch
    steps: list[LaunchedStep] = []

    def recorded(runner: GPURunner, plan: StepPlan) -> LaunchedStep:
        steps.append(launch(runner, plan))
        return steps[-1]

    monkeypatch.setattr(GPURunner, "launch", recorded)
    engine = start(tiny, often_right(expected, seed=2), length=3)
    found = run(engine, work)
    assert_same_output(expected, found)
    assert found.accepted > 2
    shapes = [step.packed.shape for step in steps]
    assert [step.typical for step in steps] == [shape in shapes[:place] for place, shape in enumerate(shapes)]
    graphs = runner_of(engine).preparation.graphs
    assert graphs is not None
    assert {bool(shape.tiles) for shape in graphs._captured} == {False, True}
    assert device.type == "cuda" or ReplayedGraph.count > 5
    if device.type == "cuda":  # in idle time kernels are compiled first
        return
    graphs._captured.clear()
    assert engine.prepare()
    assert list(graphs._captured) == [BatchShape(1, 1, 1, 0, 1, 8)]
    while engine.prepare():
        pass
    captured = [(shape.tokens, shape.drafts) for shape in graphs._captured]
    decodes, drafts = [(1, False), (2, False), (4, False)], [(2, True), (4, True), (8, True)]
    assert captured == [decodes[0], (32, False), decodes[1], (16, False), decodes[2], *drafts]
    graphs._captured.clear()
    graphs._seen[shapes[0]] = 1
    runner_of(engine).capture_missed()
    assert list(graphs._captured) == [shapes[0]]
    assert not graphs.missed


def test_speculation_is_measured_after_its_steps_are_captured(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[GPURunner] = []

    def begin(engine: Engine) -> None:
        raise InterruptedError

    monkeypatch.setattr(GPURunner, "capture_decodes", lambda runner: captured.append(runner))
    monkeypatch.setattr(Engine, "step", begin)
    maker = EngineMaker(tiny, {"device": tiny.model.device.type, "dtype": "float32"})
    with pytest.raises(InterruptedError):
        compare_speculation(maker, SpeculationSettings(scenarios=("chat",), batches=(1,)))
    assert len(captured) == len({*captured}) == 3  # twice without drafts, and once with drafts of ngram
