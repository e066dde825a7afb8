"""Reasoning in a model's text is found in every format, however the text is cut, and other text stays content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from chairlift.core.sampling.structure import Structure
from chairlift.errors import InvalidParameter
from chairlift.structured.compiler import grammar_of
from chairlift.text.assistant_parts import (
    ArgumentsDelta,
    AssistantPart,
    CallBegun,
    ContentDelta,
    PlainParser,
    ReasoningDelta,
)
from chairlift.text.reasoning import ReasoningUse, effort_variables
from chairlift.text.reasoning_formats.base import Phase, ReasoningFormat, choose_reasoning
from chairlift.text.reasoning_formats.harmony import HarmonyReasoning
from chairlift.text.reasoning_formats.marked import CohereReasoning, GraniteReasoning, MagistralFormat, ThinkFormat
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_formats.json_calls import HermesFormat
from chairlift.text.tool_formats.named_calls import HarmonyFormat
from chairlift.text.tools.tool_use import ToolUse
from tests.text.test_tool_formats import cut
from tests.tiny import CHATML, byte_level_tokenizer

FORMATS: dict[str, ReasoningFormat] = {
    "think": ThinkFormat(""),
    "mistral": MagistralFormat(""),
    "granite 3.2": GraniteReasoning(""),
    "granite 3.3": GraniteReasoning("<response></response>"),
    "harmony": HarmonyReasoning(""),
    "cohere": CohereReasoning(""),
}
WRITTEN = {
    "think": "<think>\n{}\n</think>\n\n{}",
    "mistral": "[THINK]{}[/THINK]{}",
    "granite 3.2": "Here is my thought process: {}\n\nHere is my response: {}",
    "cohere": "<|START_THINKING|>{}<|END_THINKING|>{}",
    "granite 3.3": "<think>{}</think>\n<response>{}</response>",
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
}
# Fragments of reasoning, which in random order are close to it and sometimes form it.
FRAGMENTS = [
    *(
        "<think>",
        "</think>",
        "<th",
        "</",
        "[THINK]",
        "[/THINK]",
        "Here is my ",
        "thought process:",
        "response:",
        "Here's ",
    ),
    *(
        "<|channel|>",
        "analysis",
        "final",
        "<|message|>",
        "<|end|>",
        "<|start|>assistant",
        " to=functions.add",
        "<|call|>",
    ),
    *(
        "<response>",
        "</response>",
        " ",
        "\n\n",
        "a word",
        "é",
        "缆车",
        "commentary",
        "to",
        '{"a": 1}',
        "<|constrain|>json",
    ),
]
fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
few_examples = settings(max_examples=20)
every_format = pytest.mark.parametrize("kind", FORMATS)


def parts(kind: str, pieces: list[str], phase: Phase = Phase.POSSIBLE) -> list[AssistantPart]:
    reader = FORMATS[kind].parser(phase, PlainParser())
    return [part for piece in pieces for part in reader.push(piece)] + reader.close()


def joined(found: list[AssistantPart]) -> tuple[str, str]:
    reasoning = "".join(part.text for part in found if isinstance(part, ReasoningDelta))
    content = "".join(part.text for part in found if isinstance(part, ContentDelta))
    return reasoning, content


@every_format
@pytest.mark.parametrize(("thought", "answer"), [("I think\n\nso.", "Yes,\n it does."), ("", "Yes"), ("so", "")])
def test_reasoning_and_content_are_separated(kind: str, thought: str, answer: str) -> None:
    text = WRITTEN[kind].format(thought, answer)
    for pieces in ([text], list(text)):
        assert joined(parts(kind, pieces)) == (thought, answer)
        assert not any(part.text == "" for part in parts(kind, pieces) if isinstance(part, ReasoningDelta))


@every_format
@few_examples
@given(data=st.data(), phase=st.sampled_from(Phase))
def test_the_result_does_not_depend_on_how_the_text_is_cut(kind: str, data: st.DataObject, phase: Phase) -> None:
    text, pieces = data.draw(cut(st.lists(fragments | st.just(WRITTEN[kind]), max_size=4).map("".join)))
    assert joined(parts(kind, pieces, phase)) == joined(parts(kind, [text], phase))


@every_format
@few_examples
@given(data=st.data())
def test_with_tools_too(kind: str, data: st.DataObject) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    _, pieces = data.draw(cut(st.just(WRITTEN[kind].format("so", f"Well {call}"))))
    reader = FORMATS[kind].parser(Phase.POSSIBLE, HermesFormat("").parser({"add"}))
    found = [part for piece in pieces for part in reader.push(piece)] + reader.close()
    assert joined(found) == ("so", "Well")
    assert [part.name for part in found if isinstance(part, CallBegun)] == ["add"]
    assert "".join(part.text for part in found if isinstance(part, ArgumentsDelta)) == '{"a": 1}'


@pytest.mark.parametrize("kind", ["think", "mistral", "granite 3.2"])
@few_examples
@given(text=fragments | st.text())
def test_text_without_reasoning_is_content(kind: str, text: str) -> None:
    reasoning, content = joined(parts(kind, [text]))
    if not any(text.lstrip().startswith(begin) for begin in FORMATS[kind].begins):
        assert (reasoning, content) == ("", text)
    assert joined(parts(kind, [text], Phase.CLOSED)) == ("", text)


@every_format
def test_reasoning_is_not_held_back(kind: str) -> None:
    reader = FORMATS[kind].parser(Phase.OPEN, PlainParser())
    for word in ("So", " the lift", " never stops."):
        assert reader.push(word) == [ReasoningDelta(word)]


EXAMPLES: list[tuple[str, str, Phase, tuple[str, str]]] = [
    ("think", "so</think>\n\nyes", Phase.OPEN, ("so", "yes")),
    ("think", "<think>\nso</think>yes", Phase.OPEN, ("so", "yes")),  # the model repeats the marker of the prompt
    ("think", "so", Phase.OPEN, ("so", "")),  # truncated
    ("think", "so </thi", Phase.OPEN, ("so </thi", "")),
    ("think", "yes </think> no", Phase.POSSIBLE, ("", "yes </think> no")),
    ("think", "\n<think>so</think> a <think>b</think>", Phase.POSSIBLE, ("so", "a <think>b</think>")),
    ("granite 3.2", "Here's my thought process: a Here's my response: b", Phase.POSSIBLE, ("a", "b")),
    ("granite 3.3", "<think>a</think>b", Phase.POSSIBLE, ("a", "b")),
    ("harmony", "<|channel|>final<|message|>yes", Phase.POSSIBLE, ("", "yes")),
    ("harmony", "a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>", Phase.OPEN, ("a\n\nb", "")),
    ("harmony", "<|channel|>commentary<|message|>Let me see.<|end|>", Phase.POSSIBLE, ("", "Let me see.")),
    ("harmony", "a plain answer", Phase.POSSIBLE, ("", "a plain answer")),
    ("harmony", "<|channel|>analysis", Phase.POSSIBLE, ("", "")),
]


@pytest.mark.parametrize(("kind", "text", "phase", "expected"), EXAMPLES, ids=lambda value: ascii(value)[:40])
def test_single_texts(kind: str, text: str, phase: Phase, expected: tuple[str, str]) -> None:
    assert joined(parts(kind, [text], phase)) == expected


def test_the_format_is_chosen_from_the_template() -> None:
    qwen = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    assert isinstance(choose_reasoning(qwen), ThinkFormat)
    assert isinstance(choose_reasoning("<think></think> <response></response>"), GraniteReasoning)
    assert isinstance(choose_reasoning("Here is my thought process:"), GraniteReasoning)
    assert isinstance(choose_reasoning("<|start|>assistant<|channel|>analysis<|message|>"), HarmonyReasoning)
    assert isinstance(choose_reasoning("[THINK][/THINK]"), MagistralFormat)
    assert isinstance(choose_reasoning("<|START_THINKING|><|END_THINKING|>"), CohereReasoning)
    assert isinstance(choose_reasoning("<think></think> <response>{{ result }}</response>"), ThinkFormat)  # MiniMax
    assert choose_reasoning(CHATML) is None
    assert choose_reasoning(qwen, "none") is None
    assert isinstance(choose_reasoning(CHATML, "granite"), GraniteReasoning)
    with pytest.raises(InvalidParameter, match="unknown reasoning_parser 'morse'; choose from cohere, granite"):
        choose_reasoning(qwen, "morse")


def tokenizer(template: str = CHATML, marks: tuple[str, ...] = ("<think>", "</think>")) -> Tokenizer:
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return Tokenizer(backend, chat_template=template)


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")], ids=["text", "tokens"])
def test_the_phase_after_a_prompt(marks: tuple[str, ...]) -> None:
    tokens = tokenizer(marks=marks)
    for prompt, phase in (
        ("assistant\n<think>\n", Phase.OPEN),
        ("assistant\n<think>\n\n</think>\n\n", Phase.CLOSED),
        ("What is <think>?\nassistant\n", Phase.POSSIBLE),
    ):
        assert ReasoningUse.after(tokens.encode(prompt), ThinkFormat(""), tokens).phase is phase
    assert not ReasoningUse.after(tokens.encode("<think>"), None, tokens).active


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")], ids=["text", "tokens"])
@few_examples
@given(thought=st.text(max_size=20), answer=st.text(max_size=10))
def test_reasoning_tokens_are_counted(marks: tuple[str, ...], thought: str, answer: str) -> None:
    tokens = tokenizer(marks=marks)
    ids = [tokens.encode(part, add_special_tokens=False) for part in ("<think>", thought, "</think>", answer)]
    if "think>" in thought:
        return
    tracker = ReasoningUse(ThinkFormat(""), tokens, Phase.POSSIBLE).tracker()
    assert tracker is not None
    for token in [token for part in ids for token in part]:
        tracker.push(token)
        tracker = tracker.copy()
    assert tracker.over
    assert tracker.count == len(ids[1])


def test_efforts_become_template_variables() -> None:
    switch, levels = tokenizer("{{ enable_thinking }}"), tokenizer("{{ reasoning_effort }}")
    plain = ThinkFormat("")
    cases: list[tuple[str | None, Tokenizer, dict[str, Any]]] = [
        (None, switch, {}),
        ("none", switch, {"enable_thinking": False}),
        ("low", switch, {"enable_thinking": True}),
        ("high", tokenizer("{{ thinking }}"), {"thinking": True}),
        ("high", levels, {"reasoning_effort": "high"}),
    ]
    for effort, tokens, expected in cases:
        assert effort_variables(effort, plain, tokens) == expected
    with pytest.raises(InvalidParameter, match="reasoning_effort: this model always reasons"):
        effort_variables("none", plain, tokenizer())
    # What cannot have an effect is satisfied.
    assert effort_variables("low", plain, tokenizer()) == {}
    assert effort_variables("low", None, levels) == {}
    assert effort_variables("none", None, levels) == {}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def test_harmony_has_three_efforts() -> None:
    known, harmony = frozenset({"reasoning_effort"}), HarmonyReasoning("")
    given = ("minimal", "low", "medium", "high", "xhigh")
    found = [harmony.template_variables(effort, known)["reasoning_effort"] for effort in given]
    assert found == ["low", "low", "medium", "high", "high"]
    with pytest.raises(InvalidParameter, match="always reasons: choose low, medium or high"):
        harmony.template_variables("none", known)


HARMONY_CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"
IN_ROLE = " to=functions.add<|channel|>commentary json<|message|>{}<|call|>"


@pytest.mark.parametrize("call", [HARMONY_CALL, HARMONY_CALL + "<|call|>", IN_ROLE])
@few_examples
@given(data=st.data())
def test_calls_of_harmony_are_found_in_any_header(call: str, data: st.DataObject) -> None:
    before = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    _, pieces = data.draw(cut(st.just(before + call.format('{"a": 1}'))))
    reader = HarmonyReasoning("").parser(Phase.POSSIBLE, HarmonyFormat("").parser({"add"}))
    found = [part for piece in pieces for part in reader.push(piece)] + reader.close()
    assert joined(found) == ("so", "")
    assert [part.name for part in found if isinstance(part, CallBegun)] == ["add"]
    assert "".join(part.text for part in found if isinstance(part, ArgumentsDelta)) == '{"a": 1}'


HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<|return|>")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_grammars_allow_reasoning_before_calls_and_content(kind: str, choice: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    harmony = kind == "harmony"
    tokens = tokenizer(marks=HARMONY_MARKS if harmony else ("<think>", "</think>"))
    tools = ToolUse.of(HarmonyFormat("") if harmony else HermesFormat(""), [TOOL], choice, None)
    use = ReasoningUse(FORMATS[kind], tokens, Phase.POSSIBLE)
    structure = tools.structure(use, Structure.json({"const": "x"}) if choice == "none" else None)
    assert structure is not None
    vocabulary = LLTokenizer(tokens._backend.to_str(), eos_token=2)

    def fits(text: str) -> bool:
        grammar = LLMatcher.grammar_from_lark(grammar_of(structure, [2]))  # type: ignore[arg-type]
        matcher, ids = LLMatcher(vocabulary, grammar), tokens.encode(text, add_special_tokens=False)
        assert not matcher.is_error(), matcher.get_error()
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    call = tools.format.write([("add", '{"a": 1}')]).removesuffix("<|call|>")
    before, header, _ = WRITTEN[kind].split("{}")
    thought = f"{before}I think{header.removesuffix('<|channel|>final<|message|>').removesuffix('<response>')}"
    content = "<|channel|>final<|message|>" if harmony else ""
    for start in ("", thought):
        assert fits(start + call) == (choice != "none")
        assert fits(start + call.replace("1", "true")) is False
        assert fits(f"{start}{content}Well.") == (choice == "auto")
        assert fits(f'{start}{content}"x"') == (choice != "required")
    if harmony:  # a text before a call; before a structure it would be part of the content
        preamble = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        assert fits(preamble + call) == (choice != "none")
        assert not fits(f'{preamble}{content}"x"') or choice == "auto"
