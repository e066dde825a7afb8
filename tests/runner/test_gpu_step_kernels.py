"""Steps whose kernels are not compiled yet are computed by generic kernels, with the same result."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from chairlift.core.sampling.params import SamplingParams
from chairlift.kernels import graphs as gpu_graphs
from chairlift.kernels.graphs import Graphs, StepKernels
from chairlift.kernels.triton.launch import tuned
from chairlift.runner.gpu import runner as gpu_runner
from chairlift.runner.gpu.forward import StepForward
from chairlift.runner.gpu.shapes import BatchShape
from chairlift.runner.gpu.step import ComputedStep
from tests.runner.gpu_engine import generate, make_engine, random_model, random_prompts
from tests.runner.test_gpu_graphs import record, runner_of

pytestmark = pytest.mark.usefixtures("paged_backend")

GENERIC = "generic"


class SlowCompiler:
    """Compiles the generic kernels at once, and the others when `finish` is called."""

    def __init__(self) -> None:
        self.requested: list[object] = []
        self.finished = False

    def request(self, specs: Iterable[object]) -> None:
        self.requested += specs

    def wait(self, specs: Iterable[object]) -> None:
        assert list(specs) == [GENERIC]

    def has_compiled(self, specs: Iterable[object]) -> bool:
        assert {*specs} <= {*self.requested}
        return self.finished


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SlowCompiler:
    made = SlowCompiler()
    monkeypatch.setattr(gpu_graphs, "_compiler", lambda: made)
    monkeypatch.setattr(StepKernels, "_enabled", True)
    monkeypatch.setattr(
        StepKernels, "kernels_of", lambda self, shapes, generic=False: [GENERIC] if generic else list(shapes)
    )
    monkeypatch.setattr(gpu_runner, "can_capture", lambda device: True)
    monkeypatch.setattr(Graphs, "_record", record)
    return made


def test_no_step_waits_for_its_kernels(
    compiler: SlowCompiler, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(device)
    work = [(prompt, SamplingParams(temperature=0.0, max_tokens=4)) for prompt in random_prompts(3)]
    expected = generate(make_engine(model, gpu=False), work)
    computed: list[tuple[BatchShape, bool]] = []
    forward = StepForward.compute

    def recorded(steps: StepForward, shape: BatchShape, **how: bool) -> ComputedStep:
        computed.append((shape, tuned()))
        return forward(steps, shape, **how)

    monkeypatch.setattr(StepForward, "compute", recorded)
    engine = make_engine(model, gpu=True)
    graphs = runner_of(engine).preparation.graphs
    assert graphs is not None
    assert generate(engine, work) == expected
    assert computed
    assert not any(is_tuned for _, is_tuned in computed)
    assert {shape for shape, _ in computed} <= {*compiler.requested}
    assert not graphs._captured
    while engine.prepare():
        pass
    assert not graphs._captured, "nothing is captured before its kernels are compiled"
    assert {*graphs.likely} <= {*compiler.requested}, "in idle time, likely steps are prepared"
    compiler.finished = True
    computed.clear()
    engine = make_engine(model, gpu=True)
    assert generate(engine, work) == expected
    assert any(is_tuned for _, is_tuned in computed)
