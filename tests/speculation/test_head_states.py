"""What a draft head keeps of each step that it observes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.attention.storage import KVStorage
from chairlift.core.request import Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel
from chairlift.speculation.draft_models import HeadNetwork
from chairlift.speculation.drafter import ComputedBatch
from chairlift.speculation.head_states import KeptStates
from tests.speculation.running import SETTINGS, drafter_of, run, start, uneven_work

# Operations that launch nothing on a device.
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


def head_of(engine: Engine) -> HeadNetwork:
    network = drafter_of(engine).network
    assert isinstance(network, HeadNetwork)
    return network


def kept_by(network: HeadNetwork) -> KeptStates:
    assert isinstance(network.states, KeptStates)
    return network.states


def launches_beside(tiny: LoadedModel, draft: Path, num_decodes: int) -> list[str]:
    """The launches of a step with a prompt beside `num_decodes` decodes."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=1, max_batch_requests=8)
    network = head_of(engine)
    observe = network.observe_step
    observed: list[list[str]] = []

    def note_step(step: ComputedBatch, storage: KVStorage) -> None:
        with Launches() as launches:
            observe(step, storage)
        observed.append(launches.names)

    network.observe_step = note_step  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for index in range(num_decodes):
        engine.submit([5 + index, 6, 7], params)
    for _ in range(3):
        engine.step()
    engine.submit([40, 41, 42, 43], params)
    engine.step()
    return observed[-1]


def test_the_number_of_launches_does_not_depend_on_the_number_of_requests(tiny: LoadedModel, draft: Path) -> None:
    few, many = launches_beside(tiny, draft, 2), launches_beside(tiny, draft, 6)
    assert few == many
    assert len(few) > 5


def test_states_of_a_request_that_skips_a_step_are_kept(tiny: LoadedModel, draft: Path) -> None:
    """Prompts skip steps that have no room for them."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=1, max_batch_tokens=8, max_batch_requests=8)
    network = head_of(engine)
    observe = network.observe_step
    before: dict[str, int] = {}
    skipped = 0

    def note_step(step: ComputedBatch, storage: KVStorage) -> None:
        nonlocal skipped
        observe(step, storage)
        now = {request_id: pending.end for request_id, pending in kept_by(network).pending.items()}
        running = {request.id for request in engine.scheduler.state.running}
        absent = (before.keys() & running) - {chunk.request.id for chunk in step.plan.chunks}
        skipped += len(absent)
        assert all(now.get(request_id) == before[request_id] for request_id in absent)
        before.clear()
        before.update(now)

    network.observe_step = note_step  # type: ignore[method-assign]
    run(engine, uneven_work(14))
    assert skipped > 0


@pytest.mark.parametrize("setting", ["preempted", "swapped"])
def test_states_of_preempted_requests_are_dropped(tiny: LoadedModel, draft: Path, setting: str) -> None:
    """States are views of whole steps, one for each of the last steps."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=1, **SETTINGS[setting] | {"kv_memory": "60KiB"})
    network = head_of(engine)
    observe = network.observe_step

    def note_step(step: ComputedBatch, storage: KVStorage) -> None:
        observe(step, storage)
        assert all(pending.request.status is Status.RUNNING for pending in kept_by(network).pending.values())

    network.observe_step = note_step  # type: ignore[method-assign]
    assert run(engine, uneven_work(14)).preemptions


def test_no_memory_of_prompts_and_wrong_drafts_is_kept(tiny: LoadedModel, draft: Path) -> None:
    """A view of one row would keep the whole tensor in memory."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=3)
    network = head_of(engine)
    observe = network.observe_step
    spared = 0

    def note_step(step: ComputedBatch, storage: KVStorage) -> None:
        nonlocal spared
        observe(step, storage)
        chunks = step.plan.chunks
        kept = sum(1 + step.accepted.get(chunk.request.id, 0) for chunk in chunks)
        for chunk in chunks:
            part = kept_by(network).pending[chunk.request.id].parts[-1]
            assert part.untyped_storage().nbytes() <= kept * part[0].nbytes
        spared += step.plan.num_tokens - kept

    network.observe_step = note_step  # type: ignore[method-assign]
    run(engine, uneven_work(6))
    assert spared > 100
