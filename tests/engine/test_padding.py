"""Each attention backend computes the expected padding, which changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from chairlift.attention.backends import BACKENDS
from chairlift.attention.batch import StepBatch
from chairlift.config import EngineConfig
from chairlift.core.events import StepDone, TokenProduced
from chairlift.core.executor import Executor, PendingStep
from chairlift.core.plan import StepPlan
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, StartedEngine, load_model, start_engine
from chairlift.models.base import HiddenStates
from chairlift.runner.base import ModelRunner
from tests.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 1, 17)]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The model is too small for more threads."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    return load_model(str(folder), EngineConfig(device="cpu", dtype="float32"), progress=False)


def start(tiny: LoadedModel, attention: str) -> StartedEngine:
    return start_engine(tiny, EngineConfig(device="cpu", kv_memory="4MiB", attention=attention, prefix_caching=False))


class WithIdleRows(Executor):
    """Runs every plan with `count` more rows for finished requests, as a static batch does."""

    def __init__(self, runner: ModelRunner, count: int) -> None:
        self._runner, self._count = runner, count

    def launch(self, plan: StepPlan) -> PendingStep:
        return self._runner.launch(replace(plan, idle_rows=self._count))


def run(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[StepDone]]:
    ids = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    steps = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                tokens[event.request_id].append(event.token)
            elif isinstance(event, StepDone):
                steps.append(event)
    assert engine.fatal is None
    return list(tokens.values()), steps


@pytest.mark.parametrize(("attention", "padding"), [("padded", 99 * 7), ("ragged", 0), ("bursted", 0)])
def test_padding_when_a_prompt_joins_a_batch(tiny: LoadedModel, attention: str, padding: int) -> None:
    """A prompt of 100 tokens joins seven decodes: in a padded batch each of those has 99 rows of padding."""
    engine = start(tiny, attention).engine
    for i in range(7):
        engine.submit([10 + i], GREEDY)
    first, second = (next(event for event in engine.step() if isinstance(event, StepDone)) for _ in range(2))
    assert (first.requests, second.decode_tokens) == (7, 7)
    assert first.padding_tokens == second.padding_tokens == 0
    engine.submit([3 + i for i in range(100)], GREEDY)
    joined = next(event for event in engine.step() if isinstance(event, StepDone))
    assert (joined.decode_tokens, joined.prefill_tokens) == (7, 100)
    assert joined.padding_tokens == padding


@pytest.mark.parametrize("attention", BACKENDS.names())
def test_idle_rows_are_computed_and_change_no_token(tiny: LoadedModel, attention: str) -> None:
    expected, _ = run(start(tiny, "bursted").engine, PROMPTS)
    started = start(tiny, attention)
    started.engine.executor = WithIdleRows(started.runner, count=3)
    tokens, steps = run(started.engine, PROMPTS)
    assert tokens == expected
    widest = 40 if attention == "padded" else 1
    in_rectangle = 40 * len(PROMPTS) - sum(map(len, PROMPTS)) if attention == "padded" else 0
    assert steps[0].padding_tokens == 3 * widest + in_rectangle
    assert {step.padding_tokens for step in steps[1:]} == {3}  # all decode: the rectangle is one token wide


def test_padding_is_written_to_the_scratch_block(tiny: LoadedModel) -> None:
    """Blocks that the scheduler can allocate are written by tokens of requests only."""
    started = start(tiny, "padded")
    storage = started.runner.storage
    num_blocks = started.engine.scheduler.kv.num_blocks
    assert storage.scratch_block == num_blocks
    for tensor in (*storage.keys, *storage.values):
        tensor.fill_(float("nan"))
    tokens, _ = run(started.engine, PROMPTS)
    assert tokens == run(start(tiny, "ragged").engine, PROMPTS)[0]
    written = sum(len(prompt) + GREEDY.max_tokens - 1 for prompt in PROMPTS if GREEDY.max_tokens)
    for tensor in (*storage.keys, *storage.values):
        assert int(tensor[:num_blocks].isfinite().all(dim=(-1, -2)).sum()) == written
        assert tensor[num_blocks, 0].isfinite().all()


def test_the_model_computes_the_whole_rectangle(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    started = start(tiny, "padded")
    model, rows = started.runner.model, []
    compute = model.hidden_states

    def recorded(batch: StepBatch, *others: object) -> HiddenStates:
        rows.append(len(batch.tokens))
        return compute(batch, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "hidden_states", recorded)
    _, steps = run(started.engine, PROMPTS)
    assert rows == [step.decode_tokens + step.prefill_tokens + step.padding_tokens for step in steps]
    assert rows[0] == 40 * len(PROMPTS)
