"""Responses built from hand-made updates: calls among text, and rare endings."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from chairlift.core.plan import TokenLogprobs
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.generation.usage import Usage
from chairlift.server.responses.endpoint import ResponseObjectBuilder
from chairlift.server.responses.tools import InputReader
from chairlift.server.responses.types import ResponsesRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.assistant_parts import (
    ArgumentsDelta,
    AssistantPart,
    CallBegun,
    ContentDelta,
    PlainParser,
    ReasoningDelta,
)
from chairlift.text.tokenizer import Tokenizer
from tests.tiny import byte_level_tokenizer

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MODEL = ServedModel.create("m", Tokenizer(byte_level_tokenizer()))


class ScriptedParser:
    """Returns one part of a script for every update."""

    def __init__(self, script: list[AssistantPart]) -> None:
        self._script = script

    def push(self, text: str) -> list[AssistantPart]:
        return [self._script.pop(0)] if self._script else []

    def close(self) -> list[AssistantPart]:
        return []


def make_builder(parser: Any, **parameters: Any) -> ResponseObjectBuilder:
    request = ResponsesRequest(model="m", input="?", **parameters)
    return ResponseObjectBuilder(request, SamplingParams(), MODEL, parser, "resp_1", Usage(prompt_tokens=3))


def decoded(events: list[bytes]) -> list[dict[str, Any]]:
    found = [json.loads(event.decode().split("\ndata: ")[1]) for event in events]
    for event in found:
        OFFICIAL.validate_python(event, strict=True)
    return found


def streamed(script: list[AssistantPart], finish_reason: str) -> list[dict[str, Any]]:
    builder = make_builder(ScriptedParser([*script]), tools=[SHELL])
    events = [event for _ in script for event in builder.events(Update("resp_1-0"))]
    events += builder.events(Update("resp_1-0", finish_reason=finish_reason))
    return decoded([*events, *builder.end_events()])


def items_by_replay(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a client that only adds up deltas."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "output_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "reasoning_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert items[event["output_index"]] == event["item"]
    return items


SHELL = {"type": "custom", "name": "shell"}
CALL = [CallBegun(0, "call_a", "f"), ArgumentsDelta(0, '{"a"'), ArgumentsDelta(0, ": 1}")]
calls = st.text(max_size=4).map(lambda name: [CallBegun(0, f"call_{name}", name), ArgumentsDelta(0, "{}")])
custom_calls = st.text(max_size=6).map(
    lambda text: [CallBegun(0, "call_s", "shell"), *(ArgumentsDelta(0, char) for char in json.dumps({"input": text}))]
)
texts = st.text(max_size=4).map(lambda text: [ContentDelta(text)])
thoughts = st.text(max_size=4).map(lambda text: [ReasoningDelta(text)])
scripts = st.lists(st.one_of(texts, thoughts, calls, custom_calls), max_size=6)


@settings(deadline=None)
@given(script=scripts.map(lambda turns: [part for turn in turns for part in turn]), cut=st.booleans())
def test_deltas_add_up_to_the_output_items(script: list[AssistantPart], cut: bool) -> None:
    reason = "length" if cut else "stop"
    events = streamed(script, reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert events[-1]["type"] == ("response.incomplete" if cut else "response.completed")
    assert items_by_replay(events) == last["output"]
    assert [item["status"] for item in last["output"]][:-1] == ["completed"] * (len(last["output"]) - 1)
    assert last["output"][-1]["status"] == ("incomplete" if cut else "completed")
    whole = make_builder(ScriptedParser([*script]), tools=[SHELL])
    for _ in script:
        whole.add(Update("resp_1-0"))
    whole.add(Update("resp_1-0", finish_reason=reason))
    assert without_ids(whole.body()) == without_ids(last)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    return response | {"output": items, "created_at": 0, "completed_at": 0}


def test_text_and_calls_are_separate_items() -> None:
    events = streamed([ContentDelta("I will look."), *CALL, CallBegun(1, "call_b", "g")], "stop")
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    message, first, second = Response.model_validate(events[-1]["response"]).output
    assert message.type == "message"
    assert (first.type, first.call_id, first.name, first.arguments) == ("function_call", "call_a", "f", '{"a": 1}')
    assert (second.type, second.call_id, second.arguments) == ("function_call", "call_b", "")


def test_a_truncated_call_is_incomplete() -> None:
    last = streamed(CALL[:2], "length")[-1]
    assert last["type"] == "response.incomplete"
    assert (last["response"]["output"][0]["status"], last["response"]["output"][0]["arguments"]) == (
        "incomplete",
        '{"a"',
    )


@pytest.mark.parametrize("begun", [False, True])
def test_a_failure_ends_the_stream_with_two_events(begun: bool) -> None:
    builder = make_builder(PlainParser())
    events = builder.events(Update("resp_1-0", text="half an ")) if begun else []
    error = APIError(408, "too late", type_="timeout_error", code="timeout")
    *before, result, failed = decoded([*events, *builder.error_events(error)])
    assert [event["type"] for event in before[:2]] == ["response.created", "response.in_progress"]
    assert (result["type"], result["code"], result["message"]) == ("error", "timeout", "too late")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == "too late"
    if begun:
        (item,) = failed["response"]["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", "half an ")


def test_logprobs_wait_for_their_text() -> None:
    builder = make_builder(PlainParser(), include=["message.output_text.logprobs"])
    scores = [TokenLogprobs(token, -float(token), 1, ()) for token in range(5, 8)]
    events = builder.events(Update("resp_1-0", tokens=[5], logprobs=[scores[0]]))  # half a character
    events += builder.events(Update("resp_1-0", text="é", tokens=[6], logprobs=[scores[1]]))
    events += builder.events(Update("resp_1-0", tokens=[7], logprobs=[scores[2]], finish_reason="stop"))
    found = decoded(events)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [[entry["logprob"] for entry in event["logprobs"]] for event in deltas] == [[-5.0, -6.0], [-7.0]]
    (done,) = [event for event in found if event["type"] == "response.output_text.done"]
    assert [entry["logprob"] for entry in done["logprobs"]] == [-5.0, -6.0, -7.0]


@settings(deadline=None)
@given(text=st.text(max_size=12), ascii_only=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_the_input_of_a_custom_call_does_not_depend_on_the_cuts(text: str, ascii_only: bool, cuts: list[int]) -> None:
    given = json.dumps({"input": text}, ensure_ascii=ascii_only)
    ends = [0, *sorted(min(cut, len(given)) for cut in cuts), len(given)]
    reader = InputReader()
    pieces = [reader.push(given[start:end]) for start, end in pairwise(ends)]
    assert "".join([*pieces, reader.close()]) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("echo hello", "echo hello"),  # without a grammar, a model may write the text itself
        ('{"command": "ls"}', '{"command": "ls"}'),
        ("{}", ""),
        ('{"inp', ""),
        ('{"input": "half\\', "half"),
        ('{ "input" :\n"a\nb"} and more', "a\nb"),
        ('{"input": "a\\ud83d"}', "a?"),
    ],
)
def test_arguments_of_a_custom_call_in_other_forms(arguments: str, text: str) -> None:
    reader = InputReader()
    assert reader.push(arguments) + reader.close() == text


def test_settings_that_the_response_repeats_can_be_encoded() -> None:
    tool = {"type": "function", "name": "f", "description": "\ud800"}
    other = {"type": "function", "name": "g"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [other]}
    with pytest.raises(InvalidParameter, match="Unicode"):
        make_builder(PlainParser(), tools=[tool, other], tool_choice=allowed)
    wrong = {"type": "allowed_tools", "mode": "auto", "tools": [other, {"type": "x\ud800"}]}
    with pytest.raises(InvalidParameter, match="Unicode"):
        make_builder(PlainParser(), tools=[other], tool_choice=wrong)
