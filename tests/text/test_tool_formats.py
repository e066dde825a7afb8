"""Tool calls in a model's text: found in every format, however the text is cut, and nothing else is taken for one."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import InvalidParameter
from chairlift.text.assistant_parts import ArgumentsDelta, AssistantPart, CallBegun, ContentDelta
from chairlift.text.tool_formats import FORMATS, choose_format
from chairlift.text.tools.call_parser import CallParser, new_call_id

NAMES = ("get_weather", "add")
NEW_MISTRAL = "{{ tools }} [TOOL_CALLS] [ARGS]"
SPEAKERS = {name: FORMATS[name]("") for name in FORMATS} | {"mistral, names first": FORMATS["mistral"](NEW_MISTRAL)}
few = settings(max_examples=40)  # of each format
every_format = pytest.mark.parametrize("speaker", SPEAKERS)


def parser(speaker: str, **options: Any) -> CallParser:
    numbers = count()
    return SPEAKERS[speaker].parser(NAMES, new_id=lambda: f"call_{next(numbers)}", **options)


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


def read(speaker: str, text: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    content, calls = joined(parts(parser(speaker, **options), [text]))
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

# Bits that calls are made of, in any order: what almost is a call, and sometimes is one.
SHARDS = [
    *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|py"),
    *("{", "}", "[", "]", '"', ":", ",", ";", " ", "\n", "\\", "\x01", "```json", "```", "get_weather", "a word"),
    *('{"name": "add", ', '"arguments": {', '"parameters": {"a": 1}', '"name": "get_weather"', '"id": "x"', "1.5e3"),
    *('{"name": "nobody", "arguments": {}}', '{"name": "add", "arguments": {"a": "é"}}', "缆车", "true", "null", "add"),
]
rubble = st.lists(st.sampled_from(SHARDS), max_size=12).map("".join)


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    return text, [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@every_format
@few
@given(calls=calls_lists, before=st.sampled_from(["", "Let me see.", "I think\n\nso:\n"]))
def test_what_a_format_writes_it_can_read(speaker: str, calls: list[tuple[str, str]], before: str) -> None:
    written = before + SPEAKERS[speaker].write(calls)
    for pieces in ([written], list(written)):
        content, found = joined(parts(parser(speaker), pieces))
        assert content == before.rstrip()
        assert [(name, json.loads(arguments)) for _, name, arguments in found] == [
            (name, json.loads(arguments)) for name, arguments in calls
        ]


@every_format
@few
@given(data=st.data())
def test_the_cut_does_not_matter(speaker: str, data: st.DataObject) -> None:
    shards = st.lists(rubble | calls_lists.map(SPEAKERS[speaker].write), max_size=4).map("".join)
    text, pieces = data.draw(cut(shards))
    for options in ({}, {"max_calls": 1}):
        assert joined(parts(parser(speaker, **options), pieces)) == joined(parts(parser(speaker, **options), [text]))


@every_format
@few
@given(text=rubble | st.text())
def test_nothing_is_lost(speaker: str, text: str) -> None:
    content, calls = read(speaker, text)
    if not calls:
        assert content == text
    for name, _ in calls:
        assert name in NAMES
        assert name in text


@every_format
def test_arguments_come_while_they_are_written(speaker: str) -> None:
    text = SPEAKERS[speaker].write([("add", '{"numbers": [1, 2, 3], "note": "a long text"}')])
    reader = parser(speaker)
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


@every_format
def test_words_are_not_held_up(speaker: str) -> None:
    reader = parser(speaker)
    for word in ("The", " lift", " never", " stops."):
        assert reader.push(word) == [ContentDelta(word)]


@every_format
def test_only_the_first_call_is_wanted(speaker: str) -> None:
    text = SPEAKERS[speaker].write([("add", "{}"), ("get_weather", '{"city": "Oslo"}')]) + " and so on"
    content, calls = read(speaker, text, max_calls=1)
    assert calls == [("add", "{}")]
    assert content == ""


CALL = '{"name": "add", "arguments": {"a": 1}}'
READ: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>{CALL}</tool_call>", "", [("add", '{"a": 1}')]),
    ("hermes", f"a <tool_call>\n{CALL}\n</tool_call> b ", "a b", [("add", '{"a": 1}')]),
    ("hermes", f"<tool_call>{CALL}", "", [("add", '{"a": 1}')]),
    ("hermes", f"<tool_call>{CALL}}}</tool_call>", "", [("add", '{"a": 1}')]),
    ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>", "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    # Line ends in a string are written as JSON wants them, and broken arguments are passed on up to the closing tag.
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
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}", None, []),
    ("mistral", "[TOOL_CALLS][]", None, []),
    ("json", f"So:\n```json\n[{CALL}, {CALL}]\n```\n", "So:", [("add", '{"a": 1}')] * 2),
    ("json", f"{CALL}\n{CALL}", "", [("add", '{"a": 1}')] * 2),
    ("json", 'see [1](2) and {"name": "add"} and [{"x": 1}]', None, []),
    ("json", '{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', None, []),
    ("json", '{"name": "add", "arguments": [1]}', None, []),
    ("json", '{"arguments": ' + '{"a":' * 100, None, []),
]


@pytest.mark.parametrize(("speaker", "text", "content", "calls"), READ, ids=lambda value: ascii(value)[:50])
def test_one_text_after_the_other(speaker: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert read(speaker, text) == (text if content is None else content, calls)


def test_formats_are_chosen_from_the_template() -> None:
    qwen = '{% if tools %}<tools>{{ tools }}</tools> return <tool_call>\n{"name": <function-name>}\n</tool_call>'
    llama = '{% if tools %}<|start_header_id|>system {"name": function name, "parameters": dictionary}'
    assert choose_format(qwen).name == "hermes"
    assert choose_format(llama).name == "llama3_json"
    assert choose_format("{{ tools }} <|python_tag|>").name == "llama3_json"
    assert choose_format(NEW_MISTRAL).name == "mistral"
    assert choose_format("{{ tools }} <tool_call><function=name>").name == "json"
    assert choose_format("{{ tools }} <tool_call>name<arg_key>").name == "json"
    assert choose_format("{{ messages }}").name == "hermes"
    assert choose_format(qwen, "mistral").name == "mistral"
    with pytest.raises(InvalidParameter, match="tool_format: must be one of hermes, mistral, llama3_json, json"):
        choose_format(qwen, "morse")


def test_ids_differ() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(call_id.startswith("call_") and len(call_id) == 29 for call_id in ids)
