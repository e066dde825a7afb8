"""Forced tool calls: even a random model makes valid calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.server.running_server import NAME, RunningServer
from tests.server.sample_tools import CLOCK, MESSAGES, WEATHER

NAMED = {"type": "function", "function": {"name": "get_weather"}}
REQUEST: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "tools": [WEATHER, CLOCK], "max_tokens": 300}


def check(function: Any) -> None:
    arguments = json.loads(function.arguments)
    if function.name == "get_weather":
        jsonschema_rs.validate(WEATHER["function"]["parameters"], arguments)
    else:
        assert (function.name, arguments) == ("get_time", {})


def assembled(chunks: Iterable[Any], n: int = 1) -> list[dict[str, Any]]:
    """Assemble the choices of a stream and check the format of its chunks."""
    choices: list[dict[str, Any]] = [{"content": "", "calls": [], "reason": None} for _ in range(n)]
    for chunk in chunks:
        for outcome in chunk.choices:
            choice = choices[outcome.index]
            assert choice["reason"] is None, "no chunk may follow a finish reason"
            choice["content"] += outcome.delta.content or ""
            choice["reason"] = outcome.finish_reason
            for call in outcome.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(choice["calls"])
                    assert (call.type, call.function.arguments) == ("function", "")
                    choice["calls"].append({"id": call.id, "name": call.function.name, "pieces": []})
                else:
                    assert call.function.name is None
                    choice["calls"][call.index]["pieces"].append(call.function.arguments)
    return choices


def bias_towards(server: RunningServer, token: str) -> dict[str, float]:
    """A logit bias that makes a token probable wherever the grammar allows it."""
    (token_id,) = server.post("/tokenize", {"prompt": token, "add_special_tokens": False}).json()["tokens"]
    return {str(token_id): 9.0}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_in_whole_responses(tool_server: RunningServer, choice: Any) -> None:
    bias = bias_towards(tool_server, "<|im_end|>")
    answer = tool_server.client().chat.completions.create(**REQUEST, tool_choice=choice, seed=1, n=4, logit_bias=bias)
    for outcome in answer.choices:
        assert outcome.message.content is None
        calls = outcome.message.tool_calls
        assert calls
        for call in calls:
            assert call.type == "function"
            assert call.id.startswith("call_")
            check(call.function)
        if choice == NAMED:
            assert [call.function.name for call in calls] == ["get_weather"]
        assert outcome.finish_reason == ("stop" if choice == NAMED else "tool_calls")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_streams_add_up_to_whole_responses(tool_server: RunningServer, choice: Any) -> None:
    client = tool_server.client()
    request_body = REQUEST | {
        "tool_choice": choice,
        "seed": 7,
        "n": 2,
        "logit_bias": bias_towards(tool_server, "<|im_end|>"),
    }
    whole = client.chat.completions.create(**request_body)
    streamed = assembled(client.chat.completions.create(**request_body, stream=True), n=2)
    for outcome, streamed_choice in zip(whole.choices, streamed, strict=True):
        assert streamed_choice["content"] == ""
        assert streamed_choice["reason"] == outcome.finish_reason
        assert [(call["name"], "".join(call["pieces"])) for call in streamed_choice["calls"]] == [
            (call.function.name, call.function.arguments) for call in outcome.message.tool_calls or []
        ]
        for call in outcome.message.tool_calls or []:
            check(call.function)
            if call.function.name == "get_weather":
                pieces = streamed_choice["calls"][outcome.message.tool_calls.index(call)]["pieces"]  # type: ignore[union-attr]
                assert len(pieces) > 3, "the arguments must be streamed"


def test_parallel_tool_calls_allows_several_calls_or_one(tool_server: RunningServer) -> None:
    client = tool_server.client()
    request_body = REQUEST | {"tool_choice": "required", "seed": 1, "n": 4}
    many = client.chat.completions.create(**(request_body | {"max_tokens": 120}))
    assert max(len(outcome.message.tool_calls or []) for outcome in many.choices) > 1
    for outcome in many.choices:
        calls = outcome.message.tool_calls or []
        assert len({call.id for call in calls}) == len(calls)
        for call in calls[:-1]:  # the last one may be truncated by max_tokens
            check(call.function)
    for outcome in client.chat.completions.create(**request_body, parallel_tool_calls=False).choices:
        (call,) = outcome.message.tool_calls or []
        check(call.function)
        assert outcome.finish_reason == "tool_calls"


def test_a_truncated_call_has_finish_reason_length(tool_server: RunningServer) -> None:
    for stream in (False, True):
        request_body = REQUEST | {"tool_choice": NAMED, "max_tokens": 45, "seed": 1}
        if stream:
            (outcome,) = assembled(tool_server.client().chat.completions.create(**request_body, stream=True))
            arguments, reason = "".join(outcome["calls"][0]["pieces"]), outcome["reason"]
        else:
            whole = tool_server.client().chat.completions.create(**request_body).choices[0]
            arguments, reason = (whole.message.tool_calls or [])[0].function.arguments, whole.finish_reason
        assert arguments.startswith("{")
        assert reason == "length"


def test_a_call_its_result_and_a_text_answer(tool_server: RunningServer) -> None:
    """The message of the first response is sent back unchanged."""
    client = tool_server.client()
    first = client.chat.completions.create(**REQUEST, tool_choice=NAMED, seed=1).choices[0].message
    (call,) = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "snow"}'}
    for called in (first, first.model_dump()):
        request_body = REQUEST | {"messages": [*MESSAGES, called, result], "max_tokens": 8, "seed": 1}
        request_body["extra_body"] = {"ignore_eos": True}
        answer = client.chat.completions.create(**request_body, tool_choice="none").choices[0].message
        assert answer.tool_calls is None
        assert answer.content
    messages = [*MESSAGES, first.model_dump(exclude_none=True), result]
    tokens = tool_server.post("/tokenize", {"messages": messages}).json()["tokens"]
    prompt = tool_server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert "snow" in prompt
    assert json.dumps(json.loads(call.function.arguments)) in prompt


def test_calls_have_logprobs(tool_server: RunningServer) -> None:
    client = tool_server.client()
    request_body = REQUEST | {"tool_choice": NAMED, "seed": 1, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**request_body)
    content = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert len(content or []) == whole.usage.completion_tokens  # type: ignore[union-attr]
    chunks = client.chat.completions.create(**request_body, stream=True)
    outcome = [
        entry.token for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert outcome == [entry.token for entry in content or []]


def test_stream_helpers_of_the_official_client(tool_server: RunningServer) -> None:
    """`chat.completions.stream` assembles calls, and parses the arguments of strict tools."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{tool_server.url}/v1", api_key="none", timeout=60) as client:
            request_body = REQUEST | {"tool_choice": NAMED, "seed": 3}
            async with client.chat.completions.stream(**request_body) as stream:
                events = [event.type async for event in stream]
                return events, await stream.get_final_completion()

    events, final = asyncio.run(run())
    (call,) = final.choices[0].message.tool_calls
    check(call.function)
    assert call.function.parsed_arguments == json.loads(call.function.arguments)
    assert "tool_calls.function.arguments.delta" in events
    assert "tool_calls.function.arguments.done" in events


def test_tools_combine_with_a_json_response_format(tool_server: RunningServer) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    response_format = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema, "strict": True}}
    request_body = REQUEST | {"response_format": response_format, "seed": 1, "parallel_tool_calls": False}
    client = tool_server.client()
    call = client.chat.completions.create(**request_body, logit_bias=bias_towards(tool_server, "<tool_call>")).choices[
        0
    ]
    check((call.message.tool_calls or [])[0].function)
    assert (call.message.content, call.finish_reason) == (None, "tool_calls")
    answer = client.chat.completions.create(**request_body, logit_bias=bias_towards(tool_server, "{")).choices[0]
    jsonschema_rs.validate(schema, json.loads(answer.message.content or ""))
    assert (answer.message.tool_calls, answer.finish_reason) == (None, "stop")


REFUSED = [
    {"type": "object", "properties": {"a": {"type": "text"}}},
    {"type": "object", "properties": {"a": {"type": "string", "format": "unheard-of"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}, "required": ["a"]},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", REFUSED, ids=str)
def test_schemas_that_cannot_be_enforced_are_refused(
    tool_server: RunningServer, schema: dict[str, Any], stream: bool
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    body = REQUEST | {"tools": [tool], "tool_choice": "required", "stream": stream}
    response = tool_server.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "tools"
    assert "column" not in response.json()["error"]["message"]  # of a grammar that the client does not know


def test_tools_work_with_a_template_without_tools(described_server: RunningServer) -> None:
    client = described_server.client()
    outcome = client.chat.completions.create(**REQUEST, tool_choice=NAMED, seed=1).choices[0]
    (call,) = outcome.message.tool_calls or []
    check(call.function)
    answered = [*MESSAGES, outcome.message, {"role": "tool", "tool_call_id": call.id, "content": "snow"}]
    extra = {"messages": answered, "max_tokens": 8, "seed": 1, "extra_body": {"ignore_eos": True}}
    assert client.chat.completions.create(**(REQUEST | extra)).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_with_auto_the_arguments_of_a_call_match_the_schema(tool_server: RunningServer, stream: bool) -> None:
    """The model writes text at first, and at some point begins a call."""
    bias = bias_towards(tool_server, "<tool_call>")
    body = REQUEST | {"seed": 5, "n": 8, "logit_bias": dict.fromkeys(bias, 4.0)}
    client = tool_server.client()
    if stream:
        choices = assembled(client.chat.completions.create(**body, stream=True), n=8)
        calls = [(call["name"], "".join(call["pieces"]), one["reason"]) for one in choices for call in one["calls"]]
    else:
        outcomes = client.chat.completions.create(**body).choices
        choices = [{"content": one.message.content} for one in outcomes]
        calls = [
            (call.function.name, call.function.arguments, one.finish_reason)  # type: ignore[union-attr]
            for one in outcomes
            for call in one.message.tool_calls or []
        ]
    complete = [(name, arguments) for name, arguments, reason in calls if reason == "tool_calls"]
    assert len(complete) >= 4
    for name, arguments in complete:
        check(SimpleNamespace(name=name, arguments=arguments))
    assert any(choice["content"] for choice in choices)


def test_with_auto_a_schema_that_cannot_be_enforced_is_refused_only_if_strict(tool_server: RunningServer) -> None:
    unusual = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    for strict, status in ((False, 200), (True, 400)):
        tool = {"type": "function", "function": {"name": "f", "parameters": unusual, "strict": strict}}
        body = {"model": NAME, "messages": MESSAGES, "tools": [tool], "max_tokens": 4}
        response = tool_server.post("/v1/chat/completions", body)
        assert response.status_code == status, response.text
        if strict:
            assert response.json()["error"]["param"] == "tools"


def test_beam_search_works_with_tools(tool_server: RunningServer) -> None:
    body = {"model": NAME, "messages": MESSAGES, "tools": [CLOCK], "max_tokens": 4, "beam_width": 2}
    assert tool_server.post("/v1/chat/completions", body).status_code == 200


def test_no_blocks_or_requests_remain(tool_server: RunningServer) -> None:
    tool_server.wait_idle()
    assert tool_server.get("/health").status_code == 200
