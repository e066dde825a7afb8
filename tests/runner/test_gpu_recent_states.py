"""States of the last tokens, which steps leave on the device for a draft head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chairlift.core.plan import StepPlan
from chairlift.engine.startup import LoadedModel
from chairlift.kernels.triton.drafts import store_states
from chairlift.models.decoder import Decoder
from chairlift.runner.gpu.step import LaunchedStep
from chairlift.speculation.draft_models import HeadNetwork
from chairlift.speculation.head_states import KEPT, LENGTH
from tests.runner.gpu_speculation import GREEDY, start, work_of, write_random_head
from tests.runner.test_gpu_graphs import recent_of, runner_of
from tests.speculation.drafting import draft_by_pattern
from tests.speculation.running import drafter_of, run

pytestmark = pytest.mark.usefixtures("paged_backend")


def test_states_are_stored_by_slot_and_position(device: torch.device) -> None:
    """Of a chunk that is longer than a ring, the last ones; of padding, none."""
    rows = [(2, 7), (2, 8), (5, 200)] + [(1, place) for place in range(30, 30 + 150)] + [(0, -1)] * 5
    slots, positions = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
    parts = [torch.randn(len(rows), size, device=device) for size in (40, 40)]
    ring = torch.full((6 * 64 + 1, 80), -7.0, device=device)
    expected = ring.clone()
    for row, (slot, position) in enumerate(rows):
        if position >= 0:
            expected[64 * slot + position % 64] = torch.cat([part[row] for part in parts])
    store_states(parts, slots, positions, ring, 64)
    torch.testing.assert_close(ring, expected)


def test_steps_without_drafts_do_nothing_on_the_host_for_a_head(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head neither observes steps nor clears blocks, whether they have prompts or not."""
    assert isinstance(tiny.model, Decoder)
    engine = start(tiny, speculate=f"draft:{write_random_head(tmp_path, tiny.model)}", draft_length=2)
    draft_by_pattern(engine.scheduler.speculation, lambda step: False)
    assert recent_of(runner_of(engine)) is drafter_of(engine).network.states
    for name in ("observe_step", "begin_draft"):
        monkeypatch.setattr(HeadNetwork, name, lambda *given: pytest.fail("nothing is drafted"))
    run(engine, work_of(GREEDY, GREEDY.clone(max_tokens=12)))


def test_a_head_computes_prompts_with_the_target_and_the_last_tokens_later(tiny: LoadedModel, tmp_path: Path) -> None:
    assert isinstance(tiny.model, Decoder)
    speculate = f"draft:{write_random_head(tmp_path, tiny.model)}"
    engine = start(tiny, speculate=speculate, draft_length=2, max_prefill_tokens=6, block_size=16, kv_memory="4MiB")
    draft_by_pattern(engine.scheduler.speculation, lambda step: False)
    network = drafter_of(engine).network
    runner = runner_of(engine)
    launch = runner.launch
    found: list[tuple[int, int]] = []  # known tokens, and the first that the head would compute

    def note(plan: StepPlan) -> LaunchedStep:
        launched = launch(plan)
        launched.result()
        found.extend((one.request.num_known, network.first_position(one.request)) for one in plan.chunks)
        return launched

    runner.launch = note  # type: ignore[method-assign]
    prompt = [5 + place % 50 for place in range(14)]
    run(engine, [(prompt, GREEDY.clone(max_tokens=80))])
    assert recent_of(runner).ring.any()
    pending = {known - first for known, first in found if known > len(prompt)}
    assert max(pending) == KEPT < LENGTH
    assert {first for known, first in found if len(prompt) < known < len(prompt) + KEPT} == {len(prompt)}
