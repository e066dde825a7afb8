"""Drafts on the GPU runner change no token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from chairlift.attention.paged.slots import Slots
from chairlift.core.events import StepDone
from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel
from chairlift.models.decoder import Decoder
from chairlift.runner.gpu.runner import GPURunner
from chairlift.speculation.draft_models import FirstLayers
from chairlift.speculation.proposers.base import Draft, DraftTerms
from tests.runner.gpu_speculation import GREEDY, plain, start, work_of, write_random_head
from tests.speculation.drafting import draft_by_pattern, fixed_length
from tests.speculation.running import Run, Work, assert_same_output, drafter_of, often_right, proposer_with, run

pytestmark = pytest.mark.usefixtures("paged_backend")


def test_drafts_change_no_token(tiny: LoadedModel) -> None:
    """With arg max, draws and host sampling, in steps with prompts, decodes and drafts."""
    work = work_of(
        GREEDY.clone(max_tokens=14),
        GREEDY.clone(temperature=0.8, top_k=20, top_p=0.9, seed=3),
        GREEDY.clone(repetition_penalty=1.4, logprobs=2),
        GREEDY.clone(temperature=1.0, logit_bias={5: 3.0}, min_tokens=3, seed=4, ignore_eos=False),
        GREEDY.clone(max_tokens=9),
    )
    expected = plain(tiny, work)
    engine = start(tiny, often_right(expected, seed=1), length=4, max_prefill_tokens=7)
    found = run(engine, work)
    assert_same_output(expected, found)
    assert found.accepted > 10
    assert found.proposed > found.accepted
    logprobs = [[one.logprobs for one in each.outcomes.values()][2] for each in (expected, found)]
    assert [one and one.rank for one in logprobs[0]] == [one and one.rank for one in logprobs[1]]
    # Drafts change the shapes of products, and so the last bits of float32.
    values = [[one and one.logprob for one in each] for each in logprobs]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_blocks_that_only_drafts_needed_are_sent_again() -> None:
    """Only drafts needed the third block; in the next step another block replaces it."""
    slots = Slots(max_requests=1, table_width=8, block_size=4, device=torch.device("cpu"))
    request = Request("r", [1] * 6, GREEDY, max_new_tokens=9, arrival=0.0)
    request.append(1)
    sent = []
    for table, drafts in (([5, 6, 7], (1, 2)), ([5, 6, 8], (1,) * 4), ([5, 6, 8, 9], (1,) * 6), ([5, 6, 9], ())):
        cells: list[int] = []
        blocks: list[int] = []
        chunk = Chunk(request, 6, 1 + len(drafts), table, samples=True, drafts=drafts)
        slots.table_changes(slots.of(request), chunk, cells, blocks)
        sent.append(blocks)
        first = slots.of(request).index * 8
        assert [cell - first for cell in cells] == list(range(len(table)))[len(table) - len(blocks) :]
    assert sent == [[5, 6, 7], [8], [8, 9], [9]]


@pytest.mark.slow
def test_preempted_requests_lose_no_token(tiny: LoadedModel) -> None:
    work = work_of(*[GREEDY.clone(max_tokens=12)] * 3)
    expected = plain(tiny, work)
    engine = start(tiny, often_right(expected, seed=3), length=6, kv_memory="22KiB", prefix_caching=False)
    found = run(engine, work)
    assert_same_output(expected, found)
    assert found.preemptions > 0
    assert found.proposed > found.accepted > 5


def alternate(step: int) -> bool:
    """Draft in three steps, then not in two, in which the engine works ahead again."""
    return step % 5 < 3


def test_all_drafts_of_the_model_itself_are_accepted(tiny: LoadedModel, folder: Path) -> None:
    """This includes drawn drafts with rejection sampling, since both distributions are equal."""
    work = work_of(GREEDY.clone(max_tokens=12), GREEDY, GREEDY.clone(temperature=1.0, top_k=30, max_tokens=9))
    expected = plain(tiny, work)
    engine = start(tiny, speculate=f"draft:{folder}", seed=None)
    draft_by_pattern(engine.scheduler.speculation, alternate)
    ahead = []
    engine.subscribe(lambda events: ahead.append(len(engine._pipeline)))
    found = run(engine, work)
    greedy = [name for name, _ in zip(expected.outcomes, work[:2], strict=False)]
    assert [found.outcomes[name].tokens for name in greedy] == [expected.outcomes[name].tokens for name in greedy]
    assert found.proposed == found.accepted > 5
    assert {0, 1} <= set(ahead), "only some steps must be pipelined"


@pytest.mark.slow
def test_all_drafts_of_all_layers_are_accepted(tiny: LoadedModel) -> None:
    work = work_of(GREEDY, GREEDY.clone(max_tokens=9))
    engine, model = start(tiny), tiny.model
    assert isinstance(model, Decoder)
    assert isinstance(engine.executor, GPURunner)
    proposer = proposer_with(engine, FirstLayers(model, 2))
    engine.scheduler.speculation = fixed_length(proposer, 3, max_drafts=4)
    rows = []
    engine.subscribe(lambda events: rows.extend(event.decode_tokens for event in events if isinstance(event, StepDone)))
    found = run(engine, work)
    assert_same_output(plain(tiny, work), found)
    assert found.proposed == found.accepted > 5
    assert max(rows) == 2 + 4, "drafts are limited by the rows of the device"


def drafts_of(engine: Engine, work: Work) -> tuple[Run, dict[tuple[str, int], list[int]]]:
    """Return the run, and its drafts by request and number of known tokens."""
    drafted: dict[tuple[str, int], list[int]] = {}
    proposer = drafter_of(engine)
    propose = proposer.propose

    def recorded(requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft]:
        drafts = propose(requests, terms)
        drafted.update({(one.id, one.num_known): list(some.tokens) for one, some in zip(requests, drafts, strict=True)})
        return drafts

    proposer.propose = recorded  # type: ignore[method-assign]
    return run(engine, work), drafted


@pytest.mark.slow
def test_a_draft_head_drafts_the_same_as_on_the_cpu_runner(tiny: LoadedModel, tmp_path: Path) -> None:
    """The states of the head come from prompt chunks, from pipelined steps and from others."""
    model = tiny.model
    assert isinstance(model, Decoder)
    speculate = f"draft:{write_random_head(tmp_path, model)}"
    work = work_of(GREEDY, GREEDY.clone(max_tokens=10))
    expected, here = drafts_of(start(tiny, attention="bursted", speculate=speculate, max_prefill_tokens=6), work)
    engine = start(tiny, speculate=speculate, max_prefill_tokens=6)
    draft_by_pattern(engine.scheduler.speculation, alternate)
    found, there = drafts_of(engine, work)
    assert_same_output(expected, found)
    both = here.keys() & there.keys()
    assert len(both) > 3
    assert [here[key] for key in both] == [there[key] for key in both]


@pytest.mark.slow
def test_a_draft_head_that_pauses_changes_no_token(tiny: LoadedModel, tmp_path: Path) -> None:
    model = tiny.model
    assert isinstance(model, Decoder)
    work = work_of(GREEDY, GREEDY.clone(max_tokens=10))
    engine = start(tiny, speculate=f"draft:{write_random_head(tmp_path, model)}", max_prefill_tokens=6)
    draft_by_pattern(engine.scheduler.speculation, lambda step: step % 12 >= 6)
    found = run(engine, work)
    assert_same_output(plain(tiny, work), found)
    assert found.proposed


@pytest.mark.slow
def test_grammars_hold_for_every_draft(tiny: LoadedModel) -> None:
    pytest.importorskip("llguidance")
    shapes = Structure.regex("[0-9]{3}-[a-f]{2,5}"), Structure.choice(["red", "reddish"])
    work = work_of(*(SamplingParams(structure=one, max_tokens=10, temperature=0.0) for one in shapes))
    expected = plain(tiny, work)
    found = run(start(tiny, often_right(expected, seed=4)), work)
    assert_same_output(expected, found)
    assert found.accepted > 1
