"""gpt-oss on a real server: harmony's channels as reasoning, tool calls and content, in three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.models.gpt_oss_checkpoint import MARKS, write_gpt_oss
from tests.server.response_events import sse
from tests.server.running_server import NAME, RunningServer, start_server
from tests.server.sample_tools import CLOCK, MESSAGES, WEATHER
from tests.server.test_messages import WEATHER as MESSAGE_TOOL
from tests.server.test_messages import events_of

BUDGET = 5
PARAMETERS = WEATHER["function"]["parameters"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}
# The template begins the analysis, which the random model would not end by itself.
THINKS: dict[str, Any] = {"chat_template_kwargs": {"begin_analysis": True}, "seed": 1}
CHAT: dict[str, Any] = {
    "model": NAME,
    "messages": MESSAGES,
    "max_tokens": 250,
    "thinking_token_budget": BUDGET,
    **THINKS,
}


def bias(server: RunningServer) -> dict[str, Any]:
    """Make the random model begin no further analysis and no text to the user before a call."""
    avoided = {}
    for text in ("<|message|>", *("analysis"[:size] for size in range(1, 9))):
        tokens = posted(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        if len(tokens) == 1:
            avoided[str(tokens[0])] = -100.0
    return {"logit_bias": avoided}


@pytest.fixture(scope="module")
def harmony_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("harmony") / NAME
    write_gpt_oss(folder)
    running = start_server(folder, tmp_path_factory.mktemp("harmony_server") / "log")
    yield running
    assert running.stop() == 0, running.tail()


def posted(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def deltas(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post("/v1/chat/completions", body | {"stream": True})
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


def assert_no_marks(*texts: str) -> None:
    assert not any(mark in text for text in texts for mark in MARKS)


def test_analysis_is_reasoning_and_final_is_content(harmony_server: RunningServer) -> None:
    body = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "lift", "schema": SCHEMA}}}
    body |= bias(harmony_server)
    answer = posted(harmony_server, "/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    jsonschema_rs.validate(SCHEMA, json.loads(message["content"]))
    assert message["reasoning_content"]
    assert_no_marks(message["content"], message["reasoning_content"])
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == BUDGET
    assert answer["choices"][0]["finish_reason"] == "stop"
    pieces = deltas(harmony_server, body)
    for name in ("content", "reasoning_content"):
        assert "".join(piece.get(name) or "" for piece in pieces) == message[name]


def test_calls_of_a_chat(harmony_server: RunningServer) -> None:
    body = CHAT | bias(harmony_server) | {"tools": [WEATHER, CLOCK], "tool_choice": "required"}
    (choice,) = posted(harmony_server, "/v1/chat/completions", body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    assert choice["message"]["reasoning_content"]
    (call,) = choice["message"]["tool_calls"]
    function = call["function"]
    if function["name"] == "get_weather":
        jsonschema_rs.validate(PARAMETERS, json.loads(function["arguments"]))
    parts = [part["function"] for piece in deltas(harmony_server, body) for part in piece.get("tool_calls") or []]
    assert "".join(part.get("name") or "" for part in parts) == function["name"]
    assert "".join(part.get("arguments") or "" for part in parts) == function["arguments"]


def test_calls_of_a_response(harmony_server: RunningServer) -> None:
    tool = {"type": "function", **WEATHER["function"]}
    body = {"model": NAME, "input": "Weather?", "max_output_tokens": 250, "tools": [tool], "tool_choice": "required"}
    body |= THINKS | {"thinking_token_budget": BUDGET, "reasoning": {"effort": "high"}}
    body |= bias(harmony_server)
    reasoning, call = posted(harmony_server, "/v1/responses", body)["output"]
    assert (reasoning["type"], call["type"], call["name"]) == ("reasoning", "function_call", "get_weather")
    jsonschema_rs.validate(PARAMETERS, json.loads(call["arguments"]))
    assert_no_marks(reasoning["content"][0]["text"], call["arguments"])
    events = sse(harmony_server, body)
    streamed = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(streamed) == call["arguments"]


def test_calls_of_a_message(harmony_server: RunningServer) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 250, "tools": [MESSAGE_TOOL], **THINKS}
    body |= {"tool_choice": {"type": "any"}, "thinking": {"type": "enabled", "budget_tokens": BUDGET}}
    body |= bias(harmony_server)
    message = posted(harmony_server, "/v1/messages", body)
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]
    assert message["stop_reason"] == "tool_use"
    jsonschema_rs.validate(PARAMETERS, message["content"][1]["input"])
    kinds = {event["delta"]["type"] for event in events_of(harmony_server.post("/v1/messages", body | {"stream": True}))
             if event["type"] == "content_block_delta"}  # fmt: skip
    assert kinds == {"thinking_delta", "signature_delta", "input_json_delta"}


def test_earlier_channels_go_back_to_the_template(harmony_server: RunningServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "look it up", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    tokens = posted(harmony_server, "/tokenize", {"messages": messages, "tools": [WEATHER]})["tokens"]
    text = posted(harmony_server, "/detokenize", {"tokens": tokens})["prompt"]
    # Detokenizing leaves out special tokens.
    assert text.endswith(
        'assistantanalysislook it upassistant to=functions.get_weathercommentary json{"city": "Bern"}'
        "functions to=assistantcommentarysunnyassistant"
    )


def test_efforts(harmony_server: RunningServer) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 1}
    sizes = [
        posted(harmony_server, "/v1/chat/completions", body | {"reasoning_effort": effort})["usage"]["prompt_tokens"]
        for effort in ("low", "minimal", "high")
    ]
    assert sizes[0] == sizes[1]
    refused = harmony_server.post("/v1/chat/completions", body | {"reasoning_effort": "none"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "reasoning_effort"
    assert "choose low, medium or high" in refused.json()["error"]["message"]
