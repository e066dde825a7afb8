"""Invalid requests to /v1/responses, and the parameters that their errors name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.expected_errors import expect, nested
from tests.server.running_server import NAME, RunningServer

PATH = "/v1/responses"
HELLO = {"role": "user", "content": "hello"}


def call(**changes: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **changes}


def output(**changes: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c", "output": "done", **changes}


def part(**changes: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": "a"}, changes]}


BAD_INPUT: list[tuple[Any, str]] = [
    (None, "input"),
    (3, "input"),
    ([], "input"),
    (["hello"], "input"),
    ([HELLO] * 2049, "input"),
    ("word " * 400, "input"),
    ("\ud800", "input"),
    ([{}], "input[0].type"),
    ([HELLO, {"type": "letter", "role": "user", "content": "x"}], "input[1].type"),
    ([{"type": 3}], "input[0].type"),
    ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
    ([{"type": "reasoning", "id": "rs_1", "content": [{"type": "text", "text": ""}]}], "input[0].content[0].type"),
    ([{"type": "web_search_call", "id": "ws_1", "status": "completed"}], "input[0].type"),
    ([{"role": "tool", "content": "x"}], "input[0].role"),
    ([{"type": "message", "content": "x"}], "input[0].role"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": None}], "input[0].content"),
    ([{"role": "user", "content": []}], "input[0].content"),
    ([{"role": "user", "content": 3}], "input[0].content"),
    ([{"role": "user", "content": ["x"]}], "input[0].content[0]"),
    ([HELLO | {"colour": "red"}], "input[0].colour"),
    ([HELLO | {"status": "tired"}], "input[0].status"),
    ([part(type="input_image", image_url="data:,")], "input[0].content[1].type"),
    ([part(type="input_file", file_id="file-1")], "input[0].content[1].type"),
    ([part(type="text", text="x")], "input[0].content[1].type"),
    ([part(type="input_text")], "input[0].content[1].text"),
    ([part(type="input_text", text=3)], "input[0].content[1].text"),
    ([part(type="input_text", text="x", colour="red")], "input[0].content[1].colour"),
    ([HELLO, output()], "input[1].call_id"),
    ([HELLO, call(call_id="other"), output()], "input[2].call_id"),
    ([HELLO, call(), output(output=None)], "input[2].output"),
    ([HELLO, call(), output(output=[{"type": "input_image"}])], "input[2].output[0].type"),
    ([HELLO, call(name=None), output()], "input[1].name"),
    ([HELLO, call(call_id=None), output()], "input[1].call_id"),
    ([HELLO, call(arguments={}), output()], "input[1].arguments"),
    ([HELLO, call(), call(arguments="{"), output()], "input[2].arguments"),
    ([HELLO, call(arguments="[1]"), output()], "input[1].arguments"),
    ([HELLO, call(arguments="[" * 5000), output()], "input[1].arguments"),
    ([HELLO | {"deep": nested(600)}], "input[0].deep"),
]

BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"max_output_tokens": 1.5}, "max_output_tokens"),
    ({"max_output_tokens": 10**30}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"messages": [HELLO]}, "messages"),
    ({"n": 2}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 10**30}, "top_k"),
    ({"stop": ""}, "stop"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"min_tokens": 9, "max_output_tokens": 3}, "min_tokens"),
    ({"timeout": 0}, "timeout"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"instructions": 3}, "instructions"),
    ({"instructions": "\ud800"}, "input"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning"),
    ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"text": {"format": "json"}}, "text"),
    ({"text": {"format": {}}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "fish"}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    # Repeated in the response, which cannot carry lone surrogates.
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "description": "\ud800"}}}, "text.format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {"a" * 65: "x"}}, "metadata"),
    ({"user": 3}, "user"),
    ({"prompt_cache_key": "x" * 600}, "prompt_cache_key"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": "f"}, "tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"colour": "red"}, "colour"),
    ({f"colour{i}": "red" for i in range(300)}, None),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize(("given", "param"), BAD_INPUT, ids=lambda value: ascii(value)[:60])
def test_invalid_input_is_refused(server: RunningServer, given: Any, param: str) -> None:
    expect(server, server.post(PATH, {"model": NAME, "input": given}), 400, param)


@pytest.mark.parametrize(("change", "param"), BAD, ids=lambda value: ascii(value)[:60])
def test_invalid_parameters_are_refused(server: RunningServer, change: dict[str, Any], param: str | None) -> None:
    body = {"model": NAME, "input": "hello"} | change
    expect(server, server.post(PATH, body), 400, param)
    if not change.keys() & {"stream", "stream_options"}:
        expect(server, server.post(PATH, body | {"stream": True}), 400, param)


def test_refusals_suggest_what_to_do(server: RunningServer) -> None:
    body = {"model": NAME, "input": [{"type": "item_reference", "id": "msg_1"}]}
    assert "store: false" in server.post(PATH, body).json()["error"]["message"]
    reply = server.post(PATH, {"model": NAME, "input": "hello", "previous_response_id": "resp_1"})
    assert "send all earlier items" in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_invalid_bodies_are_refused(server: RunningServer, body: bytes) -> None:
    response = httpx.post(server.url + PATH, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_models_and_methods_are_refused(server: RunningServer) -> None:
    expect(server, server.post(PATH, {"model": "other", "input": "hello"}), 404, "model")
    assert server.get(PATH).status_code == 405
    expect(server, server.get(f"{PATH}/resp_1"), 404, None)


def test_no_blocks_or_requests_remain(server: RunningServer) -> None:
    server.wait_idle()
    assert server.metric("chairlift_requests_open") == 0
