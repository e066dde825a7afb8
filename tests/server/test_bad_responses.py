"""Invalid requests to /v1/responses, and the parameters that their errors name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.expected_errors import expect, nested
from tests.server.running_server import HTTP, NAME, RunningServer

PATH = "/v1/responses"
HELLO = {"role": "user", "content": "hello"}
FUNCTION = {"type": "function", "name": "f"}
CUSTOM = {"type": "custom", "name": "draw"}


def call(**changes: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **changes}


def output(**changes: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c", "output": "done", **changes}


def part(**changes: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": "a"}, changes]}


BAD_INPUT: list[tuple[Any, str, str]] = [
    (None, "input", "invalid_type"),
    (3, "input", "invalid_type"),
    ([], "input", "invalid_value"),
    (["hello"], "input[0]", "invalid_type"),
    ([HELLO] * 2049, "input", "invalid_value"),
    ("word " * 400, "input", "context_length_exceeded"),
    ("\ud800", "input", "invalid_value"),
    ([{}], "input[0].type", "invalid_value"),
    ([HELLO, {"type": "letter", "role": "user", "content": "x"}], "input[1].type", "invalid_value"),
    ([{"type": 3}], "input[0].type", "invalid_value"),
    ([{"type": ["message"]}], "input[0].type", "invalid_value"),
    ([{"type": "input_text", "text": 3}], "input[0].text", "invalid_type"),
    ([HELLO, {"type": "input_image", "image_url": "data:,"}], "input[1].image_url", "invalid_value"),
    ([{"type": "compaction", "encrypted_content": "x"}], "input[0].encrypted_content", "invalid_value"),
    ([HELLO, {"type": "compaction_trigger"}], "input[1].type", "invalid_value"),
    ([HELLO, {"type": "additional_tools", "tools": "f"}], "input[1].tools", "invalid_value"),
    ([HELLO, {"type": "additional_tools", "tools": [{"type": "function"}]}], "input[1].tools[0].name", "invalid_value"),
    (
        [{"role": "assistant", "content": [{"type": "refusal"}]}],
        "input[0].content[0].refusal",
        "missing_required_parameter",
    ),
    ([{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}], "input[0].call_id", "invalid_value"),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "f"}], "input[0].input", "missing_required_parameter"),
    ([{"type": "item_reference", "id": "msg_1"}], "input[0].type", "invalid_value"),
    (
        [{"type": "reasoning", "id": "rs_1", "content": [{"type": "text", "text": ""}]}],
        "input[0].content[0].type",
        "invalid_value",
    ),
    ([{"role": "tool", "content": "x"}], "input[0].role", "invalid_value"),
    ([{"type": "message", "content": "x"}], "input[0].role", "missing_required_parameter"),
    ([{"role": "user"}], "input[0].content", "missing_required_parameter"),
    ([{"role": "user", "content": None}], "input[0].content", "invalid_value"),
    ([{"role": "user", "content": []}], "input[0].content", "invalid_value"),
    ([{"role": "user", "content": 3}], "input[0].content", "invalid_value"),
    ([{"role": "user", "content": ["x"]}], "input[0].content[0]", "invalid_value"),
    ([HELLO | {"contents": "red"}], "input[0].contents", "unknown_parameter"),
    ([HELLO | {"status": "tired"}], "input[0].status", "invalid_value"),
    ([part(type="input_image", image_url="data:,")], "input[0].content[1].image_url", "invalid_value"),
    ([part(type="input_file", file_id="file-1")], "input[0].content[1].type", "invalid_value"),
    ([part(type="text", text="x")], "input[0].content[1].type", "invalid_value"),
    ([part(type="input_text")], "input[0].content[1].text", "missing_required_parameter"),
    ([part(type="input_text", text=3)], "input[0].content[1].text", "invalid_type"),
    ([part(type="input_text", text="x", annotation=[])], "input[0].content[1].annotation", "unknown_parameter"),
    ([HELLO, output()], "input[1].call_id", "invalid_value"),
    ([HELLO, call(call_id="other"), output()], "input[2].call_id", "invalid_value"),
    ([HELLO, call(), output(output=None)], "input[2].output", "invalid_value"),
    ([HELLO, call(), output(output=[{"type": "input_image"}])], "input[2].output[0].image_url", "invalid_value"),
    ([HELLO, call(name=None), output()], "input[1].name", "invalid_type"),
    ([HELLO, call(call_id=None), output()], "input[1].call_id", "invalid_type"),
    ([HELLO, call(arguments={}), output()], "input[1].arguments", "invalid_type"),
    ([HELLO, call(), call(arguments="{]"), output()], "input[2].arguments", "invalid_value"),
    ([HELLO, call(arguments="[1]"), output()], "input[1].arguments", "invalid_value"),
    ([HELLO, call(arguments="[" * 5000), output()], "input[1].arguments", "invalid_value"),
    ([HELLO | {"contnt": nested(600)}], "input[0].contnt", "unknown_parameter"),
]

BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": -1}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 1.5}, "max_output_tokens", "invalid_type"),
    ({"max_output_tokens": 10**30}, "max_output_tokens", "invalid_value"),
    ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
    ({"messages": [HELLO]}, "messages", "unknown_parameter"),
    ({"n": 2}, "n", "unknown_parameter"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"top_k": 10**30}, "top_k", "invalid_value"),
    ({"stop": 3}, "stop", "invalid_type"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ({"min_tokens": 9, "max_output_tokens": 3}, "min_tokens", "invalid_value"),
    ({"timeout": 0}, "timeout", "invalid_value"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": -1}, "top_logprobs", "invalid_value"),
    ({"include": ["weather"]}, "include[0]", "invalid_value"),
    ({"include": "message.output_text.logprobs"}, "include", "invalid_type"),
    ({"instructions": 3}, "instructions", "invalid_type"),
    ({"instructions": "\ud800"}, "input", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": False}}, "stream_options.include_usage", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usge": 1}}, "stream_options.include_usge", "unknown_parameter"),
    ({"store": "yes"}, "store", "invalid_type"),
    ({"background": True}, "background", "responses_disabled"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "responses_disabled"),
    ({"conversation": "conv_1"}, "conversation", "responses_disabled"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "responses_disabled"),
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "conversation", "invalid_value"),
    ({"previous_response_id": 3}, "previous_response_id", "invalid_type"),
    ({"previous_response_id": "r" * 101}, "previous_response_id", "invalid_value"),
    ({"conversation": {"name": "conv_1"}}, "conversation.id", "missing_required_parameter"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "invalid_value"),
    ({"moderation": {"model": "omni-moderation-latest"}}, "moderation", "invalid_value"),
    ({"max_tool_calls": 0}, "max_tool_calls", "invalid_value"),
    ({"truncation": "some"}, "truncation", "invalid_value"),
    ({"service_tier": "fats"}, "service_tier", "invalid_value"),
    ({"reasoning": {"effort": "highest"}}, "reasoning.effort", "invalid_value"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value"),
    ({"thinking_token_budget": 3}, "thinking_token_budget", "invalid_value"),
    ({"text": {"verbosity": "silent"}}, "text.verbosity", "invalid_value"),
    ({"text": {"format": "json"}}, "text.format", "invalid_type"),
    ({"text": {"format": {}}}, "text.format.type", "missing_required_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing_required_parameter"),
    ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name", "invalid_value"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "fish"}}}},
        "text.format.schema",
        "invalid_value",
    ),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    # Repeated in the response, which cannot carry lone surrogates.
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "description": "\ud800"}}},
        "text.format.description",
        "invalid_value",
    ),
    ({"text": {"format": {"type": "text", "name": "\ud800"}}}, "text.format", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unknown_parameter"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "invalid_value"),
    (
        {"metadata": {"a" * 65: "x"}},
        "metadata.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "invalid_value",
    ),
    ({"user": 3}, "user", "invalid_type"),
    ({"prompt_cache_key": "x" * 600}, "prompt_cache_key", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    ({"tools": [{}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "functions", "name": "f"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [FUNCTION | {"parameters": {"type": "string"}}]}, "tools[0].parameters", "invalid_value"),
    ({"tools": [FUNCTION | {"description": "\ud800"}]}, "tools", "invalid_value"),
    ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [CUSTOM | {"format": {"type": "picture"}}]}, "tools[0].format.type", "invalid_value"),
    ({"tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format", "invalid_value"),
    ({"tools": [CUSTOM | {"formt": "x"}]}, "tools[0].formt", "unknown_parameter"),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "invalid_value"),
    ({"tools": [{"type": "namespace", "name": "\ud800", "tools": []}]}, "tools", "invalid_value"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": "f"}]}, "tools[0].tools", "invalid_value"),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [FUNCTION] * 2}]},
        "tools[0].tools[1].name",
        "invalid_value",
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "invalid_value"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice", "invalid_value"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": ["f"]}}, "tool_choice", "invalid_value"),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}},
        "tool_choice.mode",
        "invalid_value",
    ),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CUSTOM]}},
        "tool_choice.tools[0]",
        "invalid_value",
    ),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
        "tool_choice",
        "invalid_value",
    ),
    ({"tools": "f"}, "tools", "invalid_type"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "invalid_value"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"instruction": "red"}, "instruction", "unknown_parameter"),
    ({f"colour{i}": "red" for i in range(300)}, None, "invalid_value"),
    ({"model": 3}, "model", "invalid_type"),
]


@pytest.mark.parametrize(("given", "param", "code"), BAD_INPUT, ids=lambda value: ascii(value)[:60])
def test_invalid_input_is_refused(server: RunningServer, given: Any, param: str, code: str) -> None:
    expect(server, server.post(PATH, {"model": NAME, "input": given}), 400, param, code)


@pytest.mark.parametrize(("change", "param", "code"), BAD, ids=lambda value: ascii(value)[:60])
def test_invalid_parameters_are_refused(
    server: RunningServer, change: dict[str, Any], param: str | None, code: str
) -> None:
    body = {"model": NAME, "input": "hello"} | change
    expect(server, server.post(PATH, body), 400, param, code)
    if not change.keys() & {"stream", "stream_options"}:
        expect(server, server.post(PATH, body | {"stream": True}), 400, param, code)


def test_refusals_suggest_what_to_do(server: RunningServer) -> None:
    body = {"model": NAME, "input": [{"type": "item_reference", "id": "msg_1"}]}
    assert "store: false" in server.post(PATH, body).json()["error"]["message"]
    reply = server.post(PATH, {"model": NAME, "input": "hello", "previous_response_id": "resp_1"})
    assert "send all earlier items" in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_invalid_bodies_are_refused(server: RunningServer, body: bytes) -> None:
    response = HTTP.post(server.url + PATH, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_models_and_methods_are_refused(server: RunningServer) -> None:
    expect(server, server.post(PATH, {"model": "other", "input": "hello"}), 404, "model", "model_not_found")
    assert server.get(PATH).status_code == 405
    expect(server, server.post(f"{PATH}/compact", {}), 400, "input")
    expect(server, server.get(f"{PATH}/resp_1"), 404, None, "responses_disabled")


def test_no_blocks_or_requests_remain(server: RunningServer) -> None:
    server.wait_idle()
    assert server.metric("chairlift_requests_open") == 0
