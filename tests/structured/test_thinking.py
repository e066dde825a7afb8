"""Thinking budgets are kept to the token: on a tiny random model, in batches, with grammars and with drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.core.events import RequestFinished, RequestPreempted, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.request import FinishReason
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from chairlift.errors import InvalidParameter
from chairlift.llm import LLM
from chairlift.text.reasoning import ReasoningUse
from chairlift.text.reasoning_formats.base import choose_reasoning
from chairlift.text.tokenizer import Tokenizer
from tests.tiny import CHATML, write_tiny_checkpoint

THINK = CHATML + "{# <think> </think> #}"
HARMONY = CHATML + "{# <|channel|> <|message|> #}"
MARKS = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
BUDGETS = [0, 1, 2, 7, 20]


def load(folder: Path, template: str) -> LoadedModel:
    write_tiny_checkpoint(folder, chat_template=template, more_special=MARKS)
    return load_model(str(folder), EngineConfig(device="cpu"), progress=False)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tmp_path_factory.mktemp("thinking") / "tiny", THINK)


def start(loaded: LoadedModel, **options: Any) -> Engine:
    options = {"device": "cpu", "kv_memory": "1MiB", "block_size": 4} | options
    return start_engine(loaded, EngineConfig(**options)).engine


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Engine:
    return start(loaded)


def prompt(tokenizer: Tokenizer, end: str = "<think>\n") -> list[int]:
    return tokenizer.encode(f"<|im_start|>assistant\n{end}", add_special_tokens=False)


def run(engine: Engine, batch: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """Run all requests at once; returns the tokens of their completions in order."""
    ids = [request_id for tokens, params in batch for request_id in engine.submit(tokens, params)]
    found: dict[str, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                found[event.request_id].append(event.token)
            if isinstance(event, RequestFinished):
                assert event.ending.reason is not FinishReason.ERROR, event.ending
        check_accounting(engine.scheduler)
    assert engine.fatal is None
    check_quiescent(engine.scheduler)
    return list(found.values())


def thought(output: Sequence[int], end: int) -> list[int]:
    assert end in output, output
    return list(output[: output.index(end)])


def params(budget: int | None, **more: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True, "seed": 1}
    return SamplingParams(**defaults | more, thinking_token_budget=budget)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_marker_is_forced_when_the_budget_is_spent(engine: Engine, temperature: float) -> None:
    tokenizer = engine.tokenizer
    (end,) = tokenizer.encode("</think>", add_special_tokens=False)
    opened = prompt(tokenizer)
    # The model's own first </think>, if any, comes later than the largest budget.
    (free,) = run(engine, [(opened, params(None, temperature=temperature, logit_bias={end: -100.0}))])
    batch = [(opened, params(budget, temperature=temperature, logit_bias={end: -100.0})) for budget in BUDGETS]
    for budget, output in zip(BUDGETS, run(engine, batch), strict=True):
        assert output[: budget + 1] == [*free[:budget], end]
        assert len(output) == 40


def test_shorter_reasoning_is_not_affected(engine: Engine) -> None:
    (end,) = engine.tokenizer.encode("</think>", add_special_tokens=False)
    opened = prompt(engine.tokenizer)
    eager: dict[str, Any] = {"logit_bias": {end: 8.0}, "max_tokens": 30}
    for seed in range(4):
        (free,) = run(engine, [(opened, params(None, seed=seed, **eager))])
        length = len(thought(free, end))
        (kept,) = run(engine, [(opened, params(length, seed=seed, **eager))])
        assert kept == free
        if length:
            (cut,) = run(engine, [(opened, params(length - 1, seed=seed, **eager))])
            assert cut[:length] == [*free[: length - 1], end]


@pytest.mark.parametrize("start_text", ["", "<think>"], ids=["by the model", "by the prompt"])
def test_completions_of_one_request_have_separate_budgets(engine: Engine, start_text: str) -> None:
    begin, end = engine.tokenizer.encode("<think></think>", add_special_tokens=False)
    bias = {end: -100.0, begin: 100.0 if not start_text else 0.0}
    tokens = prompt(engine.tokenizer, start_text)
    outputs = run(engine, [(tokens, params(5, n=4, logit_bias=bias))])
    assert len(outputs) == 4
    for output in outputs:
        generated = thought(output, end)
        if not start_text:
            assert generated.pop(0) == begin
        assert len(generated) == 5


def test_reasoning_that_the_prompt_has_ended_or_the_model_omits_is_not_limited(engine: Engine) -> None:
    begin, end = engine.tokenizer.encode("<think></think>", add_special_tokens=False)
    for text in ("<think>\n\n</think>\n\n", ""):
        tokens = prompt(engine.tokenizer, text)
        plain = {"logit_bias": {begin: -100.0, end: -100.0}}
        free, limited = run(engine, [(tokens, params(None, **plain)), (tokens, params(3, **plain))])
        assert limited == free


@pytest.mark.parametrize("start_text", ["", "<think>\n"], ids=["by the model", "by the prompt"])
@pytest.mark.parametrize(
    "structure",
    [
        Structure.json(SCHEMA),
        Structure.choice(["red", "blue"]),
        Structure.regex("[a-c]{3}"),
        Structure.grammar('start: "x"+ "y"'),
    ],
    ids=lambda structure: structure.kind.value,
)
def test_a_structure_begins_after_the_reasoning(engine: Engine, structure: Structure, start_text: str) -> None:
    tokenizer = engine.tokenizer
    begin, end = tokenizer.encode("<think></think>", add_special_tokens=False)
    tokens = prompt(tokenizer, start_text)
    use = ReasoningUse.after(tokens, choose_reasoning(THINK), tokenizer)
    after = structure.after(use.grammar(answer=True))
    bias = {end: -100.0, begin: 100.0 if not start_text else 0.0}
    more: dict[str, Any] = {"logit_bias": bias, "max_tokens": 200, "ignore_eos": False}
    batch = [(tokens, params(budget, structure=after, seed=budget, **more)) for budget in BUDGETS]
    for budget, output in zip(BUDGETS, run(engine, batch), strict=True):
        generated = thought(output, end)
        answer = tokenizer.decode(output[output.index(end) + 1 :]).strip()
        assert len(generated) == budget + (not start_text)
        match structure.kind.value:
            case "json_schema":
                assert isinstance(json.loads(answer)["n"], int)
            case "choice":
                assert answer in ("red", "blue")
            case "regex":
                assert len(answer) == 3
                assert set(answer) <= set("abc")
            case _:
                assert answer.strip("x") == "y"


def test_a_model_may_answer_without_reasoning(engine: Engine) -> None:
    begin = engine.tokenizer.encode("<think>", add_special_tokens=False)[0]
    tokens = prompt(engine.tokenizer, "")
    use = ReasoningUse.after(tokens, choose_reasoning(THINK), engine.tokenizer)
    structure = Structure.choice(["red"]).after(use.grammar(answer=True))
    limited = params(3, structure=structure, logit_bias={begin: -100.0}, ignore_eos=False)
    (output,) = run(engine, [(tokens, limited)])
    assert engine.tokenizer.decode(output) == "red"


def test_budgets_with_drafts_give_the_same_output(loaded: LoadedModel, engine: Engine) -> None:
    drafting = start(loaded, speculate="ngram", draft_length=4)
    (end,) = engine.tokenizer.encode("</think>", add_special_tokens=False)
    opened = prompt(engine.tokenizer, "the lift the lift the lift <think>")
    use = ReasoningUse.after(opened, choose_reasoning(THINK), engine.tokenizer)
    structure = Structure.json(SCHEMA).after(use.grammar(answer=True))
    batch = [
        (opened, params(budget, temperature=0.0, logit_bias={end: -100.0}, max_tokens=60, structure=grammar))
        for budget in BUDGETS
        for grammar in (None, structure)
    ]
    outputs = run(drafting, batch)
    assert outputs == run(engine, batch)
    for (_, one), output in zip(batch, outputs, strict=True):
        assert len(thought(output, end)) == one.thinking_token_budget


def test_budgets_with_drafts_that_are_drawn(loaded: LoadedModel) -> None:
    drafting = start(loaded, speculate="layers:1", draft_length=4)
    (end,) = drafting.tokenizer.encode("</think>", add_special_tokens=False)
    opened = prompt(drafting.tokenizer)
    batch = [(opened, params(budget, seed=None, logit_bias={end: -100.0})) for budget in BUDGETS]
    for budget, output in zip(BUDGETS, run(drafting, batch), strict=True):
        assert len(thought(output, end)) == budget


def test_structures_of_offline_chats_begin_after_the_reasoning(tmp_path: Path) -> None:
    begins = THINK.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    write_tiny_checkpoint(tmp_path / "tiny", chat_template=begins, more_special=MARKS)
    llm = LLM(str(tmp_path / "tiny"), device="cpu", kv_memory="1MiB", progress=False)
    end = llm.get_tokenizer().encode("</think>", add_special_tokens=False)[0]
    limited = params(4, structure=Structure.choice(["red"]), logit_bias={end: -100.0}, ignore_eos=False)
    chat = [{"role": "user", "content": "a colour?"}]
    (result,) = llm.chat(chat, limited, use_tqdm=False)
    output = result.outputs[0].token_ids
    assert len(thought(output, end)) == 4
    assert llm.get_tokenizer().decode(output[5:]).strip() == "red"
    assert "".join(piece.text for piece in llm.stream_chat(chat, limited)) == result.outputs[0].text


def test_preemptions_do_not_affect_budgets(loaded: LoadedModel, engine: Engine) -> None:
    (end,) = engine.tokenizer.encode("</think>", add_special_tokens=False)
    opened = prompt(engine.tokenizer)
    batch = [(opened, params(20 + seed, seed=seed, max_tokens=60, logit_bias={end: -100.0})) for seed in range(6)]
    roomy = run(engine, batch)
    block = 4 * 2 * 2 * 2 * 16 * 4  # bytes: 4 tokens, two layers, keys and values, two heads of 16 floats
    tight = start(loaded, kv_memory=30 * block, max_model_len=80, max_batch_requests=6)
    preemptions: list[RequestPreempted] = []
    tight.subscribe(lambda events: preemptions.extend(e for e in events if isinstance(e, RequestPreempted)))
    assert run(tight, batch) == roomy
    assert preemptions
    assert [len(thought(output, end)) for output in roomy] == [20 + seed for seed in range(6)]


def test_a_marker_of_several_tokens_is_forced_as_a_whole(tmp_path: Path) -> None:
    """Granite's markers are plain text, so the tokens before may merge with them."""
    loaded = load(tmp_path / "tiny", CHATML + "{# Here is my thought process: #}")
    engine = start(loaded, max_model_len=200)
    tokenizer = engine.tokenizer
    opened = tokenizer.encode("Here is my thought process:", add_special_tokens=False)
    end = tokenizer.encode("Here is my response:", add_special_tokens=False)
    assert len(end) > 3
    for budget, output in zip(BUDGETS, run(engine, [(opened, params(budget)) for budget in BUDGETS]), strict=True):
        assert output[budget : budget + len(end)] == end
        assert "Here is my response:" in tokenizer.decode(output)


def test_a_budget_covers_all_analysis_messages_of_harmony(tmp_path: Path) -> None:
    loaded = load(tmp_path / "tiny", HARMONY)
    engine = start(loaded, max_model_len=200)
    tokenizer = engine.tokenizer
    channel, message, end, begin = tokenizer.encode("<|channel|><|message|><|end|><|start|>", add_special_tokens=False)
    analysis = tokenizer.encode("analysis", add_special_tokens=False)
    structure = Structure.grammar("start: /[a-z]{5}/")
    tokens = tokenizer.encode("<|start|>assistant", add_special_tokens=False)
    use = ReasoningUse.after(tokens, choose_reasoning(HARMONY), tokenizer)
    after = structure.after(use.grammar(answer=True))
    commentary = tokenizer.encode("commentary", add_special_tokens=False)
    bias = {end: -100.0, analysis[0]: 50.0, commentary[0]: -50.0}  # it would always write analysis
    for budget in (0, 6):
        limited = params(budget, structure=after, logit_bias=bias, max_tokens=120, ignore_eos=False)
        (output,) = run(engine, [(tokens, limited)])
        first = [channel, *analysis, message]
        if budget:
            assert output[: len(first)] == first
            assert output.index(end) == len(first) + budget
            assert output[output.index(end) + 1] == begin
        assert output.count(channel) == (2 if budget else 1)  # no second analysis
        tracker = use.tracker()
        assert tracker is not None
        for token in output:
            tracker.push(token)
        assert tracker.count == budget
        assert tracker.over


def test_budgets_are_refused_where_they_have_no_meaning(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokens = prompt(engine.tokenizer)
    for bad in (-1, 1.5, True, "3"):
        with pytest.raises(InvalidParameter, match="thinking_token_budget"):
            params(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="thinking_token_budget: is not supported with beam_width"):
        SamplingParams(thinking_token_budget=3, beam_width=2)
    plain = start(load(tmp_path_factory.mktemp("plain") / "tiny", CHATML))
    with pytest.raises(InvalidParameter, match="thinking_token_budget: this model has no reasoning"):
        plain.submit(tokens, params(3))
    assert plain.submit(tokens, params(None))
