"""Tool calls in whole and streamed chat responses."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from chairlift.core.plan import TokenLogprobs
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.response_builder import CompletionResponseBuilder, ParsedChoiceFormat
from chairlift.server.openai.types import ChatRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.messages import Update
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_formats.json_calls import HermesFormat
from chairlift.text.tools.tool_use import ToolUse
from tests.tiny import byte_level_tokenizer

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "get_time")]
TEXT = 'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "get_time"}'
CUTS = [0, 3, 10, 33, 50, 68, len(TEXT)]
PIECES = [TEXT[start:end] for start, end in pairwise(CUTS)]


MODEL = ServedModel.create("tiny", Tokenizer(byte_level_tokenizer()))
BODY = ChatRequest(model="tiny", messages=[{"role": "user", "content": "hello"}])


def make_builder(n: int = 1, logprobs: bool = False, **request: Any) -> CompletionResponseBuilder:
    tools = ToolUse.of(HermesFormat(""), TOOLS, request.get("tool_choice"), request.get("parallel_tool_calls"))
    ids = ["r", *(f"r#{index}" for index in range(1, n))]
    choices = ParsedChoiceFormat(logprobs, tools, tools.parser)
    return CompletionResponseBuilder(choices, MODEL, BODY, "chatcmpl-1", ids, Usage())


def updates(pieces: list[str], request_id: str = "r", reason: str = "stop") -> list[Update]:
    output = [Update(request_id, text=piece, tokens=[5]) for piece in pieces]
    return [*output, Update(request_id, tokens=[2], finish_reason=reason)]


def streamed(builder: CompletionResponseBuilder, given: list[Update]) -> list[dict[str, Any]]:
    events = [event for update in given for event in builder.events(update)]
    return [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]


def test_a_whole_response() -> None:
    builder = make_builder()
    for update in updates(PIECES):
        builder.add(update)
    (choice,) = builder.body()["choices"]
    message = choice["message"]
    assert message["content"] == "Yes."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


def test_empty_content_is_null_and_missing_calls_are_absent() -> None:
    for text, content, calls in [(TEXT[5:], None, 2), ("Yes. ", "Yes. ", 0), ("", "", 0)]:
        builder = make_builder()
        for update in updates([text]):
            builder.add(update)
        message = builder.body()["choices"][0]["message"]
        assert message["content"] == content
        assert len(message.get("tool_calls", [])) == calls
        assert ("tool_calls" in message) == bool(calls)


def test_a_stream_of_content_and_calls() -> None:
    chunks = streamed(make_builder(), updates(PIECES))
    deltas = [chunk["delta"] for chunk in chunks]
    first, second = deltas[3]["tool_calls"][0].pop("id"), deltas[6]["tool_calls"][0].pop("id")
    assert first != second
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Yes"},
        {"content": "."},
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"index": 1, "type": "function", "function": {"name": "get_time", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * 8 + ["tool_calls"]


def test_a_stream_that_begins_with_a_call() -> None:
    chunks = streamed(make_builder(), updates([TEXT[5:]]))
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[1]["delta"]["tool_calls"][0]["function"] == {"name": "add", "arguments": ""}
    # The role comes with the first token even if its text is held back.
    chunks = streamed(make_builder(), updates(list(TEXT[5:])))
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}


def test_choices_are_parsed_separately() -> None:
    builder = make_builder(n=2)
    both = [update for pair in zip(updates(PIECES), updates(PIECES, "r#1", "length"), strict=True) for update in pair]
    chunks = streamed(builder, both)
    for index, reason in enumerate(["tool_calls", "length"]):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["delta"].get("content") or "" for chunk in mine) == "Yes."
        calls = [call for chunk in mine for call in chunk["delta"].get("tool_calls", [])]
        assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 0) == '{"a": 1}'
        assert mine[-1]["finish_reason"] == reason
    ids = [call["id"] for chunk in chunks for call in chunk["delta"].get("tool_calls", []) if "id" in call]
    assert len(set(ids)) == 4


def test_every_token_has_its_logprob_once() -> None:
    given = [
        Update("r", text=piece, tokens=[index], logprobs=[TokenLogprobs(index, -0.5, 1, ((index, -0.5),))])
        for index, piece in enumerate(PIECES)
    ]
    given.append(Update("r", tokens=[2], logprobs=[TokenLogprobs(2, -0.1, 1, ())], finish_reason="stop"))
    chunks = streamed(make_builder(logprobs=True), given)
    result = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    whole = make_builder(logprobs=True)
    for update in given:
        whole.add(update)
    assert result == whole.body()["choices"][0]["logprobs"]["content"]
    assert len(result) == len(PIECES) + 1


def test_finish_reasons_and_single_calls() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    assert streamed(make_builder(tool_choice=named), updates(PIECES))[-1]["finish_reason"] == "stop"
    assert streamed(make_builder(tool_choice="required"), updates(PIECES))[-1]["finish_reason"] == "tool_calls"
    assert streamed(make_builder(), updates(["words"]))[-1]["finish_reason"] == "stop"
    single = make_builder(parallel_tool_calls=False)
    for update in updates(PIECES):
        single.add(update)
    assert len(single.body()["choices"][0]["message"]["tool_calls"]) == 1
