"""Tool calls in a model's text are found in every format, however the text is cut, and other text stays content."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import InvalidParameter
from chairlift.text.assistant_parts import ArgumentsDelta, AssistantPart, CallBegun, ContentDelta
from chairlift.text.tool_formats.base import TOOL_FORMATS, ToolFormat, choose_format
from chairlift.text.tool_formats.json_calls import HermesFormat, LlamaFormat
from chairlift.text.tool_formats.named_calls import DeepSeekFormat, MistralFormat
from chairlift.text.tools.call_parser import CallParser, new_call_id

NAMES = ("get_weather", "add")
NEW_MISTRAL = "{{ tools }} [TOOL_CALLS] [ARGS]"
FORMATS: dict[str, ToolFormat] = {name: TOOL_FORMATS.get(name)("") for name in TOOL_FORMATS.names()}
FORMATS |= {"mistral, names first": MistralFormat(NEW_MISTRAL), "deepseek, fenced": DeepSeekFormat("```json")}
few_examples = settings(max_examples=15)  # of each format
every_format = pytest.mark.parametrize("kind", FORMATS)
VERBATIM = [kind for kind, format_ in FORMATS.items() if format_.verbatim]
TRANSLATED = [kind for kind in FORMATS if kind not in VERBATIM]


def parser(kind: str, **options: Any) -> CallParser:
    numbers = count()
    return FORMATS[kind].parser(NAMES, new_id=lambda: f"call_{next(numbers)}", **options)


def parts(reader: CallParser, pieces: list[str]) -> list[AssistantPart]:
    return [part for piece in pieces for part in reader.push(piece)] + reader.close()


def joined(found: list[AssistantPart]) -> tuple[str, list[tuple[str, str, str]]]:
    content = "".join(part.text for part in found if isinstance(part, ContentDelta))
    calls = [part for part in found if isinstance(part, CallBegun)]
    assert [call.index for call in calls] == list(range(len(calls)))
    arguments = {call.index: "" for call in calls}
    for part in found:
        if isinstance(part, ArgumentsDelta):
            assert part.text
            arguments[part.index] += part.text
    return content, [(call.call_id, call.name, arguments[call.index]) for call in calls]


def read(kind: str, text: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    content, calls = joined(parts(parser(kind, **options), [text]))
    assert [call_id for call_id, _, _ in calls] == [f"call_{i}" for i in range(len(calls))]
    return content, [(name, arguments) for _, name, arguments in calls]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments_texts = st.dictionaries(st.text(), json_values, max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
calls_lists = st.lists(st.tuples(st.sampled_from(NAMES), arguments_texts), min_size=1, max_size=3)

# Fragments of calls, which in random order are close to a call and sometimes form one.
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|py"),
    *(
        "<|channel|>commentary to=functions.",
        "add",
        "<|message|>",
        "<|call|>",
        "<function=add>",
        "<parameter=a>",
        "</parameter>",
    ),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<minimax:tool_call>",
        '<invoke name="add">',
        "</invoke>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.add:0", "<|tool_call_argument_begin|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call|>", "<|/tool_call|>", "functools[", "[add(", "a=", "'x'", ")"),
    *("{", "}", "[", "]", '"', ":", ",", ";", " ", "\n", "\\", "\x01", "```json", "```", "get_weather", "a word"),
    *('{"name": "add", ', '"arguments": {', '"parameters": {"a": 1}', '"name": "get_weather"', '"id": "x"', "1.5e3"),
    *(
        '{"name": "unknown", "arguments": {}}',
        '{"name": "add", "arguments": {"a": "é"}}',
        "缆车",
        "true",
        "null",
        "add",
    ),
]
fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("kind", VERBATIM)
@few_examples
@given(calls=calls_lists, before=st.sampled_from(["", "Let me see.", "I think\n\nso:\n"]))
def test_a_parser_finds_the_calls_that_its_format_writes(kind: str, calls: list[tuple[str, str]], before: str) -> None:
    written = before + FORMATS[kind].write(calls)
    for pieces in ([written], list(written)):
        content, found = joined(parts(parser(kind), pieces))
        assert content == before.rstrip()
        assert [(name, json.loads(arguments)) for _, name, arguments in found] == [
            (name, json.loads(arguments)) for name, arguments in calls
        ]


@every_format
@few_examples
@given(data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_cut(kind: str, data: st.DataObject) -> None:
    calls = calls_lists if kind in VERBATIM else typed_calls.map(lambda found: [(call[0], call[1]) for call in found])
    texts = st.lists(fragments | calls.map(FORMATS[kind].write), max_size=4).map("".join)
    text, pieces = data.draw(cut(texts))
    for options in ({}, {"max_calls": 1}):
        assert joined(parts(parser(kind, **options), pieces)) == joined(parts(parser(kind, **options), [text]))


@every_format
@few_examples
@given(text=fragments | st.text())
def test_text_without_calls_is_passed_on_unchanged(kind: str, text: str) -> None:
    content, calls = read(kind, text)
    if not calls:
        assert content == text
    for name, _ in calls:
        assert name in NAMES
        assert name in text


@pytest.mark.parametrize("kind", VERBATIM)
def test_arguments_are_streamed_character_by_character(kind: str) -> None:
    text = FORMATS[kind].write([("add", '{"numbers": [1, 2, 3], "note": "a long text"}')])
    reader = parser(kind)
    begun = arguments = 0
    for character in text:
        for part in reader.push(character):
            begun += isinstance(part, CallBegun)
            if isinstance(part, ArgumentsDelta):
                assert len(part.text) == 1
                arguments += 1
    assert begun == 1
    assert arguments == len('{"numbers": [1, 2, 3], "note": "a long text"}')
    assert reader.close() == []


# Arguments of formats without JSON: any text in a string, and other values by their type.
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": ["number", "null"]},
        "flag": {"$ref": "#/$defs/flag"},
        "items": {"type": "array"},
        "options": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "level": {"enum": ["1", "2"]},
    },
    "$defs": {"flag": {"type": "boolean"}},
}
plain_texts = st.text(st.characters(exclude_characters="<\x00", exclude_categories=["Cs"])) | st.sampled_from(
    ["true", "12", "null", '"quoted"', "{}", "line\nline", " spaces ", "it's", "\\n"]
)
typed_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": plain_texts,
        "count": st.integers(),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "items": st.lists(st.integers() | st.booleans() | st.none() | st.just("a, b)]")),
        "options": st.dictionaries(st.sampled_from("xyz"), st.integers()) | st.just("a word"),
        "level": st.sampled_from(["1", "2"]),
    },
).map(lambda value: json.dumps(value, ensure_ascii=False))
typed_calls = st.lists(st.tuples(st.sampled_from(NAMES), typed_arguments), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", TRANSLATED)
@few_examples
@given(calls=typed_calls, before=st.sampled_from(["", "Let me see.", "I think\n\nso:\n"]))
def test_translated_arguments_have_their_types(kind: str, calls: list[tuple[str, str]], before: str) -> None:
    written = before + FORMATS[kind].write(calls)
    for pieces in ([written], list(written)):
        content, found = joined(parts(FORMATS[kind].parser(dict.fromkeys(NAMES, SCHEMA)), pieces))
        assert content == before.rstrip()
        assert [(name, json.loads(arguments)) for _, name, arguments in found] == [
            (name, json.loads(arguments)) for name, arguments in calls
        ]


@pytest.mark.parametrize("kind", TRANSLATED)
def test_translated_arguments_are_streamed(kind: str) -> None:
    text = FORMATS[kind].write([("add", '{"count": 12, "text": "a long text of several words"}')])
    reader = FORMATS[kind].parser({"add": SCHEMA})
    deltas = [part.text for character in text for part in reader.push(character) if isinstance(part, ArgumentsDelta)]
    assert json.loads("".join(deltas)) == {"count": 12, "text": "a long text of several words"}
    assert len(deltas) >= (4 if kind == "pythonic" else 25)


@every_format
def test_content_is_not_held_back(kind: str) -> None:
    reader = parser(kind)
    for word in ("The", " lift", " never", " stops."):
        assert reader.push(word) == [ContentDelta(word)]


@every_format
def test_text_after_max_calls_is_dropped(kind: str) -> None:
    text = FORMATS[kind].write([("add", "{}"), ("get_weather", '{"city": "Oslo"}')]) + " and so on"
    content, calls = read(kind, text, max_calls=1)
    assert calls == [("add", "{}")]
    assert content == ""


CALL = '{"name": "add", "arguments": {"a": 1}}'
EXAMPLES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>{CALL}</tool_call>", "", [("add", '{"a": 1}')]),
    ("hermes", f"a <tool_call>\n{CALL}\n</tool_call> b ", "a b", [("add", '{"a": 1}')]),
    ("hermes", f"<tool_call>{CALL}", "", [("add", '{"a": 1}')]),
    ("hermes", f"<tool_call>{CALL}}}</tool_call>", "", [("add", '{"a": 1}')]),
    ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>", "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    # Line breaks in a string are escaped, and malformed arguments are passed on up to the closing tag.
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "b\nc"}}', "", [("add", '{"a": "b\\u000ac"}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {oops}}</tool_call>!', "!", [("add", "{oops}}")]),
    ("hermes", CALL, CALL, []),
    ("llama3_json", f"<|python_tag|>{CALL}", "", [("add", '{"a": 1}')]),
    ("llama3_json", f"{CALL}; {CALL}", "", [("add", '{"a": 1}')] * 2),
    ("llama3_json", '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    ("llama3_json", '{"name": "add"} {"name": "x", "parameters": {}}', None, []),
    ("llama3_json", "<|python_tag|>print(1)", None, []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("add", '{"a": 1}')] * 2),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "abcdefghi"}]', "", [("add", "{}")]),
    ("mistral", 'so [TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', "so", [("add", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]add{"a": [}[TOOL_CALLS]add{}', "", [("add", '{"a": [}'), ("add", "{}")]),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}", None, []),
    ("mistral", "[TOOL_CALLS][]", None, []),
    ("json", f"So:\n```json\n[{CALL}, {CALL}]\n```\n", "So:", [("add", '{"a": 1}')] * 2),
    ("json", f"{CALL}\n{CALL}", "", [("add", '{"a": 1}')] * 2),
    ("json", 'see [1](2) and {"name": "add"} and [{"x": 1}]', None, []),
    ("json", '{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', None, []),
    ("json", '{"name": "add", "arguments": [1]}', None, []),
    ("json", '{"arguments": ' + '{"a":' * 100, None, []),
    ("deepseek", "so <｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "so", [("add", "{}")]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", "", []),
    ("granite", f"<|tool_call|>{CALL}", "", [("add", '{"a": 1}')]),
    ("phi4", f"functools[{CALL}]", "", [("add", '{"a": 1}')]),
    ("phi4", "functools are tools", None, []),
    ("cohere", '<|START_ACTION|>[{"tool_name": "add", "parameters": {}}]<|END_ACTION|>', "", [("add", "{}")]),
    ("harmony", "<|channel|>commentary to=functions.add<|message|>{}", "", [("add", "{}")]),
    ("qwen3_coder", "<function=add><parameter=a>1</parameter></function>", "", [("add", '{"a": 1}')]),
    ("qwen3_coder", "<tool_call>\n<function=x>\n</function>\n</tool_call>", None, []),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>\n1", "", [("add", '{"a": ')]),
    ("qwen3_coder", "<tool_call><function=add>oops</tool_call>", "oops</tool_call>", [("add", "{}")]),
    ("glm4", "<tool_call>add<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>", "", [("add", '{"a": "x"}')]),
    ("minimax", '<minimax:tool_call><invoke name="add"></invoke></minimax:tool_call>', "", [("add", "{}")]),
    ("pythonic", "[add(a=1, b='x', c=[True, None])]", "", [("add", '{"a": 1, "b": "x", "c": [true, null]}')]),
    ("pythonic", "<|python_start|>[add(a=true)]<|python_end|>", "", [("add", '{"a": true}')]),
    ("pythonic", "see [1](2), [add] and [x(1)]", None, []),
    ("pythonic", "[add(a=" + "(" * 200, "a=" + "(" * 200, [("add", "{}")]),
    ("pythonic", "[add(a=open('x'))]", "a=open('x'))]", [("add", "{}")]),
    ("pythonic", "[add(a=]", "a=]", [("add", "{}")]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), EXAMPLES, ids=lambda value: ascii(value)[:50])
def test_content_and_calls_of_single_texts(
    kind: str, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    assert read(kind, text) == (text if content is None else content, calls)


def test_the_format_is_chosen_from_the_template() -> None:
    qwen = '{% if tools %}<tools>{{ tools }}</tools> return <tool_call>\n{"name": <function-name>}\n</tool_call>'
    llama = '{% if tools %}<|start_header_id|>system {"name": function name, "parameters": dictionary}'
    assert isinstance(choose_format(qwen), HermesFormat)
    assert isinstance(choose_format(llama), LlamaFormat)
    assert isinstance(choose_format("{{ tools }} <|python_tag|>"), LlamaFormat)
    assert isinstance(choose_format(NEW_MISTRAL), MistralFormat)
    for template, name in (
        ("<tool_call><function=name>", "qwen3_coder"),
        ("<tool_call>name<arg_key>", "glm4"),
        ("<minimax:tool_call><invoke name=", "minimax"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|tool_call|>", "granite"),
        ("<|tool|><|/tool|>", "phi4"),
        ("<|START_ACTION|>", "cohere"),
        ("<|channel|>commentary<|message|>", "harmony"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("something else", "json"),
    ):
        assert type(choose_format("{{ tools }} " + template)) is TOOL_FORMATS.get(name)
    assert isinstance(choose_format("{{ messages }}"), HermesFormat)
    assert isinstance(choose_format(qwen, "mistral"), MistralFormat)
    with pytest.raises(
        InvalidParameter, match="unknown tool_format 'morse'; choose from cohere, deepseek, glm4, granite, harmony"
    ):
        choose_format(qwen, "morse")


def test_call_ids_differ() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(call_id.startswith("call_") and len(call_id) == 29 for call_id in ids)
