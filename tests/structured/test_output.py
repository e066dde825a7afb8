"""Structured output in a batch, on a tiny random model, whose text is random but always allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.events import Event, RequestFinished, RequestPreempted, TextProduced, TokenProduced
from chairlift.core.executor import PendingStep
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.plan import StepPlan
from chairlift.core.request import Ending, FinishReason
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.core.scheduler.scheduler import WaitReason
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, StartedEngine, load_model, start_engine
from chairlift.errors import InvalidParameter
from chairlift.models.base import HiddenStates
from chairlift.sampling import draw
from chairlift.structured.output import TOO_COMPLEX
from tests.tiny import write_tiny_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", None]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
COLOURS = ["red", "dark green", "é👍"]


def matches_schema(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "size", "tags"]
    assert len(value["name"]) <= 3
    assert 0 <= value["size"] <= 99
    return set(value["tags"]) <= {"red", None}


CASES: dict[str, tuple[Structure, Callable[[str], Any]]] = {
    "schema": (Structure.json(SCHEMA), matches_schema),
    "regex": (Structure.regex(r"[0-9]{3}-[a-f]{2,4}"), re.compile(r"[0-9]{3}-[a-f]{2,4}").fullmatch),
    "choice": (Structure.choice(COLOURS), COLOURS.__contains__),
    "grammar": (Structure.grammar('start: "a" item+\nitem: "x" | "yy"'), re.compile("a(x|yy)+").fullmatch),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("structured") / "tiny")
    return load_model(str(folder), EngineConfig(device="cpu"), progress=False)


def start(loaded: LoadedModel, **options: Any) -> StartedEngine:
    options = {"device": "cpu", "kv_memory": "1MiB", "block_size": 4} | options
    return start_engine(loaded, EngineConfig(**options))


@pytest.fixture(scope="module")
def started(loaded: LoadedModel) -> StartedEngine:
    return start(loaded)


@pytest.fixture
def engine(started: StartedEngine) -> Engine:
    check_quiescent(started.engine.scheduler)
    return started.engine


@dataclass
class Completion:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ending: Ending | None = None


def collect(completions: dict[str, Completion], events: Sequence[Event]) -> None:
    for event in events:
        match event:
            case TokenProduced():
                completions[event.request_id].tokens.append(event.token)
            case TextProduced():
                completions[event.request_id].text += event.text
            case RequestFinished():
                assert completions[event.request_id].ending is None, "a request ends once"
                completions[event.request_id].ending = event.ending
            case _:
                pass


def run(engine: Engine, batch: Sequence[SamplingParams], prompt: Sequence[int] = (70, 71, 72)) -> list[Completion]:
    """Run all requests at once; returns their completions in order."""
    ids = [request_id for params in batch for request_id in engine.submit(prompt, params)]
    completions = {request_id: Completion() for request_id in ids}
    while engine.has_work:
        collect(completions, engine.step())
        check_accounting(engine.scheduler)
    assert engine.fatal is None
    assert all(completion.ending for completion in completions.values())
    check_quiescent(engine.scheduler)
    return list(completions.values())


def params(name: str, **more: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"max_tokens": 200, "temperature": 1.5, "structure": CASES[name][0]}
    return SamplingParams(**defaults | more)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", CASES)
def test_the_output_matches_the_structure(engine: Engine, name: str, temperature: float) -> None:
    batch = [params(name, temperature=temperature, seed=seed) for seed in range(4 if temperature else 1)]
    completions = run(engine, batch)
    for completion in completions:
        assert completion.ending == Ending(FinishReason.STOP), completion
        assert CASES[name][1](completion.text), completion
    assert len({completion.text for completion in completions}) > 1 or not temperature or name == "choice"


def test_any_json_object(engine: Engine) -> None:
    batch = [
        SamplingParams(max_tokens=100, temperature=1.0, seed=i, structure=Structure.json_object()) for i in range(8)
    ]
    finished = [completion.text for completion in run(engine, batch) if completion.ending == Ending(FinishReason.STOP)]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


def test_structured_requests_do_not_affect_others_in_the_batch(engine: Engine) -> None:
    plain = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=seed, ignore_eos=True, **more)
        for seed, (temperature, more) in enumerate(
            [(0.0, {}), (1.0, {}), (1.5, {"top_p": 0.9}), (0.0, {"repetition_penalty": 1.3}), (1.0, {"min_tokens": 20})]
        )
    ]
    alone = run(engine, plain)
    mixed = [
        one for pair in zip(plain, [params(name, seed=7) for name in (*CASES, "regex")], strict=True) for one in pair
    ]
    together = run(engine, mixed)
    assert [completion.tokens for completion in together[::2]] == [completion.tokens for completion in alone]
    assert all(completion.ending == Ending(FinishReason.STOP) for completion in together[1::2])


def test_a_seeded_request_has_the_same_output_alone_in_a_batch_and_cached(engine: Engine) -> None:
    batch = [params(name, seed=5) for name in CASES]
    alone = [run(engine, [one])[0].tokens for one in batch]
    assert [completion.tokens for completion in run(engine, batch)] == alone
    assert [completion.tokens for completion in run(engine, batch[::-1])] == alone[::-1]


def test_completions_of_one_request_have_separate_grammar_states(engine: Engine) -> None:
    completions = run(engine, [params("schema", n=4, seed=3)])
    assert len(completions) == 4
    assert all(matches_schema(completion.text) for completion in completions)
    assert len({completion.text for completion in completions}) > 1


def test_preemption_does_not_affect_grammar_states(loaded: LoadedModel, engine: Engine) -> None:
    batch = [params("schema", seed=seed) for seed in range(6)]
    roomy = run(engine, batch)
    blocks = 16 * 4 * 2 * 2 * 16 * 2  # of 4 tokens: two layers, keys and values, two heads of 16 floats
    tight = start(loaded, kv_memory=30 * blocks // 4, max_model_len=100, max_batch_requests=6).engine
    preemptions = 0

    def count(events: Sequence[Event]) -> None:
        nonlocal preemptions
        preemptions += sum(isinstance(event, RequestPreempted) for event in events)

    tight.subscribe(count)
    batch = [one.clone(max_tokens=90) for one in batch]
    completions = run(tight, batch)
    assert preemptions > 0
    for completion, undisturbed in zip(completions, roomy, strict=True):
        assert completion.tokens == undisturbed.tokens[:90]


def test_an_interrupted_step_does_not_affect_grammar_states(
    started: StartedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = started.engine, started.runner
    batch = [params("schema", seed=seed) for seed in range(3)]
    expected = [completion.tokens for completion in run(engine, batch)]
    ids = [engine.submit([70, 71, 72], one)[0] for one in batch]
    completions = {request_id: Completion() for request_id in ids}
    while not any(completion.tokens for completion in completions.values()):
        collect(completions, engine.step())

    def interrupted(*_: Any) -> torch.Tensor:
        raise KeyboardInterrupt  # while the masks are being computed

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(runner.model, "hidden_states", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        for _ in range(4):
            collect(completions, engine.step())
    while engine.has_work:
        collect(completions, engine.step())
    assert [completion.tokens for completion in completions.values()] == expected


def test_masks_are_computed_during_the_forward_pass(started: StartedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    structured, model = started.runner.structured, started.runner.model
    assert structured is not None
    begin, forward, fill = structured.begin_masks, model.hidden_states, structured._fill
    monkeypatch.setattr(structured, "begin_masks", lambda *args: (order.append("begin"), begin(*args))[1])
    monkeypatch.setattr(structured, "_fill", lambda *args: (order.append("fill"), fill(*args))[1])

    def hidden_states(*args: Any) -> HiddenStates:
        order.append("forward")
        hidden: HiddenStates = forward(*args)
        order.append("forwarded")
        return hidden

    monkeypatch.setattr(model, "hidden_states", hidden_states)
    run(started.engine, [params("choice")])
    assert order[0] == "begin"
    assert order.index("forward") < order.index("forwarded")
    assert order.count("fill") == order.count("begin")
    run(started.engine, [SamplingParams(max_tokens=3)])
    assert order.count("fill") == order.count("begin") - 3, "a batch without structures computes no masks"


# ---- endings ---------------------------------------------------------------------------------------------------------


def test_max_tokens_truncates_structured_output(engine: Engine) -> None:
    (completion,) = run(engine, [params("schema", max_tokens=5, temperature=0)])
    assert completion.ending == Ending(FinishReason.LENGTH)
    assert len(completion.tokens) == 5
    assert completion.text.startswith("{")


def test_output_that_is_complete_at_max_tokens_ends_with_stop(engine: Engine) -> None:
    structure = Structure.regex("[0-9]{4}")
    (completion,) = run(engine, [SamplingParams(max_tokens=4, structure=structure)])
    assert completion.ending == Ending(FinishReason.STOP)
    assert len(completion.tokens) == 4


@pytest.mark.parametrize("structure", [Structure.regex("a{2,9}"), Structure.regex("(ab)?"), Structure.regex("a|b{3}")])
@pytest.mark.parametrize(
    "option", [{"ignore_eos": True}, {"min_tokens": 30}, {"min_tokens": 30, "stop_token_ids": [75]}]
)
def test_the_grammar_ends_output_despite_min_tokens_and_ignore_eos(
    engine: Engine, structure: Structure, option: dict[str, Any]
) -> None:
    batch = [SamplingParams(max_tokens=40, seed=seed, structure=structure, **option) for seed in range(4)]
    for completion in run(engine, batch):
        assert completion.ending is not None
        assert completion.ending.reason is FinishReason.STOP
        assert re.fullmatch(structure.text, completion.text)
        if structure.text == "a{2,9}":
            assert completion.text == "a" * 9, "the output must be as long as the grammar allows"


def test_the_model_may_end_wherever_the_grammar_allows(engine: Engine) -> None:
    batch = [
        SamplingParams(max_tokens=60, seed=s, temperature=2.0, structure=Structure.regex("[a-z]{2,50}"))
        for s in range(8)
    ]
    assert len({len(completion.text) for completion in run(engine, batch)}) > 1


def test_stop_strings_still_stop(engine: Engine) -> None:
    (completion,) = run(engine, [params("regex", stop=["-"])])
    assert completion.ending == Ending(FinishReason.STOP, "-")
    assert re.fullmatch("[0-9]{3}", completion.text)


def test_other_sampling_parameters_cannot_break_the_structure(engine: Engine) -> None:
    bias = dict.fromkeys(range(3, 320), -100.0) | {90: 100.0, 91: 100.0}
    options: list[dict[str, Any]] = [
        {"logit_bias": bias},
        {"repetition_penalty": 2.0, "frequency_penalty": 2.0},
        {"top_k": 1},
        {"top_p": 0.1, "min_p": 0.5},
        {"temperature": 100.0},
        {"logprobs": 3},
    ]
    for completion in run(engine, [params("schema", **option) for option in options]):
        assert completion.ending == Ending(FinishReason.STOP)
        assert matches_schema(completion.text)


def test_special_tokens_can_be_named_in_a_grammar(engine: Engine) -> None:
    structure = Structure.grammar('start: <|im_start|> "a" <|im_start|>')
    shown, hidden = run(
        engine, [SamplingParams(structure=structure, skip_special_tokens=skip) for skip in (False, True)]
    )
    assert shown.text == "<|im_start|>a<|im_start|>"
    assert hidden.text == "a"
    assert shown.tokens[0] == 1


def test_a_model_without_an_end_token_ends_with_the_grammar(loaded: LoadedModel) -> None:
    endless = LoadedModel(loaded.name, loaded.model, loaded.tokenizer, frozenset())
    engine = start(endless).engine
    completions = run(engine, [params(name) for name in ("schema", "regex", "choice")])
    assert all(completion.ending == Ending(FinishReason.STOP) for completion in completions)
    with pytest.raises(InvalidParameter):
        engine.compile(Structure.regex(""))  # allows only EOS


def test_a_matcher_that_fails_ends_one_request_with_an_error(
    started: StartedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a grammar becomes too complex during generation."""
    engine, runner = started.engine, started.runner
    good = params("schema", seed=1)
    expected = run(engine, [good])[0].tokens
    ids = [engine.submit([70, 71, 72], one)[0] for one in (good, params("schema", seed=2))]
    completions = {request_id: Completion() for request_id in ids}
    while not completions[ids[0]].tokens:
        collect(completions, engine.step())
    assert runner.structured is not None
    runner.structured._states[ids[1]].matcher.consume_token(3)  # the grammar does not allow this token
    while engine.has_work:
        collect(completions, engine.step())
    assert completions[ids[0]].tokens == expected
    parameter = params("schema").structure.parameter  # type: ignore[union-attr]
    assert completions[ids[1]].ending == Ending(FinishReason.ERROR, TOO_COMPLEX, parameter)
    check_quiescent(engine.scheduler)


def test_an_optional_structure_that_fails_is_dropped(started: StartedEngine) -> None:
    engine, runner = started.engine, started.runner
    structure = replace(CASES["regex"][0], optional=True)
    (request_id,) = engine.submit([70, 71, 72], SamplingParams(max_tokens=30, structure=structure, ignore_eos=True))
    completions = {request_id: Completion()}
    while not completions[request_id].tokens:
        collect(completions, engine.step())
    assert runner.structured is not None
    runner.structured._states[request_id].matcher.consume_token(3)  # the grammar does not allow this token
    while engine.has_work:
        collect(completions, engine.step())
    assert completions[request_id].ending == Ending(FinishReason.LENGTH)
    assert len(completions[request_id].tokens) == 30
    check_quiescent(engine.scheduler)


def test_an_optional_structure_that_is_not_valid_is_ignored(engine: Engine) -> None:
    bad = Structure.regex("(")
    with pytest.raises(InvalidParameter):
        engine.compile(bad)
    for _ in range(2):  # the second time, the failure is cached
        optional = SamplingParams(max_tokens=5, structure=replace(bad, optional=True), ignore_eos=True)
        (completion,) = run(engine, [optional])
        assert completion.ending == Ending(FinishReason.LENGTH)


def test_min_tokens_apply_without_an_optional_structure_that_failed(started: StartedEngine) -> None:
    engine, (eos, *_) = started.engine, started.engine.eos_ids
    plain = SamplingParams(max_tokens=9, min_tokens=6, logit_bias={eos: 100.0})
    (expected,) = run(engine, [plain])
    (found,) = run(engine, [plain.clone(structure=replace(Structure.regex("("), optional=True))])
    assert len(found.tokens) == len(expected.tokens) == 7
    assert found.ending == Ending(FinishReason.STOP)


# ---- during compilation ----------------------------------------------------------------------------------------------

SLOW = Structure.regex("(a|b*)" * 20_000)  # more than the compiler's three seconds


def test_other_requests_run_while_a_grammar_is_compiled(loaded: LoadedModel) -> None:
    engine = start(loaded, max_batch_requests=1).engine
    slow = engine.submit([70, 71], SamplingParams(structure=Structure.regex(SLOW.text, "guided_regex"), n=2))
    assert engine.scheduler.why_waiting(slow[0]) is WaitReason.GRAMMAR
    (plain,) = engine.submit([70, 71], SamplingParams(max_tokens=5, ignore_eos=True))
    (cancelled,) = engine.submit([70, 71], SamplingParams(structure=SLOW))
    (late,) = engine.submit([70, 71], SamplingParams(structure=SLOW), timeout=0.05)
    completions = {request_id: Completion() for request_id in (*slow, plain, cancelled, late)}
    while completions[plain].ending is None or completions[late].ending is None:
        collect(completions, engine.step())
    assert completions[plain].ending == Ending(FinishReason.LENGTH)
    assert completions[late].ending == Ending(FinishReason.DEADLINE)
    assert completions[slow[0]].ending is None
    assert engine.cancel(cancelled)
    while engine.has_work:
        collect(completions, engine.step())
        check_accounting(engine.scheduler)
    assert completions[cancelled].ending == Ending(FinishReason.CANCELLED)
    for request_id in slow:
        ending = completions[request_id].ending
        assert ending is not None
        assert (ending.reason, ending.parameter) == (FinishReason.ERROR, "guided_regex")
        assert "takes more than 3 s" in str(ending.detail)
        assert not completions[request_id].tokens
    with pytest.raises(InvalidParameter) as refusal:  # the error is cached
        engine.submit([70, 71], SamplingParams(structure=SLOW))
    assert refusal.value.parameter == "structure"
    check_quiescent(engine.scheduler)


def test_a_failed_step_also_ends_requests_that_wait_for_a_grammar(loaded: LoadedModel) -> None:
    started = start(loaded)
    engine = started.engine
    waiting, running = engine.submit([70], SamplingParams(structure=SLOW)), engine.submit([70], SamplingParams())

    def broken(plan: StepPlan) -> PendingStep:
        raise RuntimeError("out of memory")

    started.runner.launch = broken  # type: ignore[method-assign]
    completions = {request_id: Completion() for request_id in (*waiting, *running)}
    collect(completions, engine.step())
    assert {completion.ending.reason for completion in completions.values() if completion.ending} == {
        FinishReason.ERROR
    }
    assert all(completion.ending for completion in completions.values())


@pytest.mark.parametrize("apply", [draw.apply_masks, draw._apply_batched])
def test_masks_leave_allowed_tokens_and_other_rows_unchanged(apply: Callable[..., None]) -> None:
    """Both implementations: by row for the CPU, batched for a GPU. Bits beyond the vocabulary have no meaning."""
    allowed = np.random.default_rng(0).integers(0, 2**32, (2, 10), dtype=np.uint32)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :300].astype(bool)
    for row, allows in zip((3, 1), bits, strict=True):
        expected[row][torch.from_numpy(~allows)] = -torch.inf
    apply(logits, draw.TokenMasks([3, 1], allowed))
    assert torch.equal(logits, expected)
