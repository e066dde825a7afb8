"""Function tools through /v1/responses, with the real client and the real server."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.response_events import in_order, sse
from tests.server.running_server import NAME, RunningServer
from tests.server.sample_tools import CLOCK, MESSAGES, WEATHER

PATH = "/v1/responses"
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}

CALL_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A chat API tool in the form of the responses API."""
    return {"type": "function", **tool["function"]}


TOOLS: list[Any] = [flat(WEATHER), flat(CLOCK)]
CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Oslo", "days": 1}'}
SECOND = {"type": "function_call", "call_id": "call_2", "name": "get_time", "arguments": ""}
RESULTS = [
    {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "noon"}]},
]


def chat_call(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def test_calls_and_results_become_the_same_prompt_as_in_a_chat(tool_server: RunningServer) -> None:
    client = tool_server.client()
    text_item = {"role": "assistant", "content": "let me look"}
    for text_items in ([text_item], []):
        answer = client.responses.create(
            input=[*MESSAGES, *text_items, CALL, SECOND, *RESULTS], tools=TOOLS, max_output_tokens=6, **GREEDY
        )
        turn = {"role": "assistant", "content": "", **(text_item if text_items else {})}
        messages: list[Any] = [
            *MESSAGES,
            turn | {"tool_calls": [chat_call(CALL), chat_call(SECOND)]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        ]
        chat = client.chat.completions.create(messages=messages, tools=[WEATHER, CLOCK], max_tokens=6, **GREEDY)
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.output_text == chat.choices[0].message.content


def test_the_response_repeats_the_tools(tool_server: RunningServer) -> None:
    request_body: dict[str, Any] = {
        "input": "hello",
        "tools": TOOLS,
        "tool_choice": "none",
        "parallel_tool_calls": False,
    }
    answer = tool_server.client().responses.create(max_output_tokens=2, **request_body, **GREEDY)
    assert [tool.name for tool in answer.tools] == ["get_weather", "get_time"]
    assert answer.tools[0].parameters == TOOLS[0]["parameters"]
    assert (answer.tool_choice, answer.parallel_tool_calls) == ("none", False)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call(tool_server: RunningServer, choice: Any) -> None:
    client = tool_server.client()
    request_body: dict[str, Any] = {
        "input": MESSAGES,
        "tools": TOOLS[:1],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = client.responses.create(model=NAME, temperature=0, **request_body)
    assert answer.status == "completed", answer
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("get_weather", "completed")
    arguments = json.loads(call.arguments)
    assert arguments["city"] in ("Oslo", "Bern")
    assert 1 <= arguments["days"] <= 9
    there = choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}
    chat = client.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=[WEATHER], tool_choice=there, parallel_tool_calls=False, temperature=0
    )
    assert call.arguments == chat.choices[0].message.tool_calls[0].function.arguments
    events = sse(tool_server, {"model": NAME, "temperature": 0, **request_body})
    assert in_order(events) == CALL_EVENTS
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == call.arguments


def test_a_call_its_result_and_the_final_response(tool_server: RunningServer) -> None:
    client = tool_server.client()
    request_body: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    first = client.responses.create(input=MESSAGES, tool_choice="required", model=NAME, temperature=0, **request_body)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items: list[Any] = [*MESSAGES, *first.output, result]
    last = client.responses.create(input=items, tool_choice="none", max_output_tokens=6, **request_body, **GREEDY)
    assert [item.type for item in last.output] == ["message"]
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [chat_call(call.to_dict())]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    chat = client.chat.completions.create(messages=messages, max_tokens=6, **GREEDY)
    assert last.usage.input_tokens == chat.usage.prompt_tokens
    assert last.output_text == chat.choices[0].message.content


class GetWeather(BaseModel):
    city: Literal["Oslo", "Bern"]


def test_parsed_arguments(tool_server: RunningServer) -> None:
    tool: Any = openai.pydantic_function_tool(GetWeather)
    answer = tool_server.client().responses.parse(
        input=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False, model=NAME, temperature=0
    )
    (call,) = answer.output
    assert isinstance(call.parsed_arguments, GetWeather)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "descripton": "x"}]}, "tools[0].descripton"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    ({"tools": [flat(CLOCK), flat(CLOCK)]}, "tools[1].name"),
    ({"tools": [flat(CLOCK), {"type": "code_interpreter"}]}, "tools[1].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "get_time"}}, "tool_choice"),
    ({"input": [*MESSAGES, CALL | {"arguments": "{]"}]}, "input[1].arguments"),
    ({"input": [*MESSAGES, CALL, RESULTS[1]]}, "input[2].call_id"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=lambda value: ascii(value)[:60])
def test_invalid_tools_are_refused(tool_server: RunningServer, change: dict[str, Any], param: str) -> None:
    response = tool_server.post(PATH, {"model": NAME, "input": "hello", **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert ".function." not in error["message"]
