"""What a draft head does with each step that it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.core.request import Status
from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel
from chairlift.runner.base import ModelRunner
from chairlift.speculation.head_network import Head
from chairlift.speculation.networks import ComputedBatch
from tests.speculation.running import run, start
from tests.speculation.test_same_output import SETTINGS, uneven_work

# Which launch nothing on a device.
VIEWS = {"alias", "detach", "select", "slice", "split", "split_with_sizes", "t", "transpose", "unsqueeze", "view"}


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def head_of(engine: Engine) -> Head:
    runner = engine.executor
    assert isinstance(runner, ModelRunner)
    assert runner.drafter is not None
    network = runner.drafter.network
    assert isinstance(network, Head)
    return network


def launches_beside(tiny: LoadedModel, draft: Path, num_decodes: int) -> list[str]:
    """Of a step with a prompt beside so many decodes."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=1, max_batch_requests=8)
    network = head_of(engine)
    follow = network.follow
    following: list[list[str]] = []

    def note_follow(step: ComputedBatch) -> None:
        with Launches() as launches:
            follow(step)
        following.append(launches.names)

    network.follow = note_follow  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for index in range(num_decodes):
        engine.submit([5 + index, 6, 7], params)
    for _ in range(3):
        engine.step()
    engine.submit([40, 41, 42, 43], params)
    engine.step()
    return following[-1]


def test_as_many_launches_however_many_requests_there_are(tiny: LoadedModel, draft: Path) -> None:
    few, many = launches_beside(tiny, draft, 2), launches_beside(tiny, draft, 6)
    assert few == many
    assert len(few) > 5


def test_who_sits_a_step_out_is_not_forgotten(tiny: LoadedModel, draft: Path) -> None:
    """Prompts that there is no room for beside others."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=1, max_batch_tokens=8, max_batch_requests=8)
    network = head_of(engine)
    follow = network.follow
    before: dict[str, int] = {}
    sat_out = 0

    def note_follow(step: ComputedBatch) -> None:
        nonlocal sat_out
        follow(step)
        now = {request_id: ahead.end for request_id, ahead in network._ahead.items()}
        running = {request.id for request in engine.scheduler.state.running}
        absent = (before.keys() & running) - {chunk.request.id for chunk in step.plan.chunks}
        sat_out += len(absent)
        assert all(now.get(request_id) == before[request_id] for request_id in absent)
        before.clear()
        before.update(now)

    network.follow = note_follow  # type: ignore[method-assign]
    run(engine, uneven_work(14))
    assert sat_out > 0


@pytest.mark.parametrize("setting", ["preempted", "swapped"])
def test_nothing_is_kept_for_those_who_had_to_leave(tiny: LoadedModel, draft: Path, setting: str) -> None:
    """Their states are views of whole steps', one for each of their last steps."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=1, **SETTINGS[setting] | {"kv_memory": "60KiB"})
    network = head_of(engine)
    follow = network.follow

    def note_follow(step: ComputedBatch) -> None:
        follow(step)
        assert all(ahead.request.status is Status.RUNNING for ahead in network._ahead.values())

    network.follow = note_follow  # type: ignore[method-assign]
    assert run(engine, uneven_work(14)).preemptions


def test_of_prompts_and_wrong_guesses_nothing_is_kept(tiny: LoadedModel, draft: Path) -> None:
    """A row of a large tensor keeps all of it in memory."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=3)
    network = head_of(engine)
    follow = network.follow
    spared = 0

    def note_follow(step: ComputedBatch) -> None:
        nonlocal spared
        follow(step)
        chunks = step.plan.chunks
        kept = sum(1 + step.accepted.get(chunk.request.id, 0) for chunk in chunks)
        for chunk in chunks:
            part = network._ahead[chunk.request.id]._parts[-1]
            assert part.untyped_storage().nbytes() <= kept * part[0].nbytes
        spared += step.plan.num_tokens - kept

    network.follow = note_follow  # type: ignore[method-assign]
    run(engine, uneven_work(6))
    assert spared > 100
