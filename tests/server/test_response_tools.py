"""Function tools through /v1/responses, with the real client and the real server."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel

from chairlift.server.wire.unknown_fields import HEADER
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


SHELL = {"type": "custom", "name": "shell", "description": "Run a command.", "format": {"type": "text"}}
TRAVEL = {"type": "namespace", "name": "travel", "description": "About lifts.", "tools": [TOOLS[1], SHELL]}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "call_3", "name": "shell", "input": 'echo "é"'}
CUSTOM_RESULT = {"type": "custom_tool_call_output", "call_id": "call_3", "output": "é"}


def prompt_tokens(server: RunningServer, **body: Any) -> int:
    """The number of tokens of the prompt."""
    reply = server.post(f"{PATH}/input_tokens", {"model": NAME, "input": "hello", **body})
    assert reply.status_code == 200, reply.text
    assert InputTokenCountResponse.model_validate(reply.json(), strict=True).object == "response.input_tokens"
    return int(reply.json()["input_tokens"])


def test_input_tokens_are_those_of_a_response(tool_server: RunningServer) -> None:
    body: dict[str, Any] = {"input": MESSAGES, "instructions": "be brief", "tools": TOOLS, "tool_choice": "auto"}
    answer = tool_server.client().responses.create(max_output_tokens=1, **body, **GREEDY)
    count = tool_server.client().responses.input_tokens.count(model=NAME, **body)
    assert count.input_tokens == answer.usage.input_tokens
    bad = tool_server.post(f"{PATH}/input_tokens", {"model": NAME, "input": [*MESSAGES, RESULTS[0]]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "input[1].call_id")


def test_tools_that_a_server_runs_are_left_out_and_named(tool_server: RunningServer) -> None:
    hosted = ["web_search", "local_shell", "tool_search", "mcp", "image_generation", "a tool of tomorrow"]
    tools = [*({"type": kind} for kind in hosted[:3]), *TOOLS, *({"type": kind} for kind in hosted[3:])]
    body = {"model": NAME, "input": MESSAGES, "tools": tools, "tool_choice": "auto", "max_output_tokens": 2}
    reply = tool_server.post(PATH, body)
    assert reply.status_code == 200, reply.text
    named = [name.partition(".")[2] for name in reply.headers[HEADER].split(", ")]
    assert named == [*hosted[:-1], "a%20tool%20of%20tomorrow"]
    assert [tool["name"] for tool in reply.json()["tools"]] == ["get_weather", "get_time"]
    assert prompt_tokens(tool_server, tools=tools) == prompt_tokens(tool_server, tools=TOOLS)
    for choice in ({"type": "web_search"}, {"type": "mcp", "server_label": "x"}):
        refused = tool_server.post(PATH, {**body, "tool_choice": choice})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice.type")
    alone = tool_server.post(PATH, {**body, "tools": tools[:3], "parallel_tool_calls": True})
    assert (alone.status_code, alone.json()["tools"]) == (200, [])


def test_the_tools_of_a_namespace_are_called_by_their_own_names(tool_server: RunningServer) -> None:
    body: dict[str, Any] = {"model": NAME, "input": MESSAGES, "temperature": 0, "parallel_tool_calls": False}
    choice = {"type": "function", "name": "get_time", "namespace": "travel"}
    events = sse(tool_server, {**body, "tools": [TRAVEL], "tool_choice": choice})
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "get_time", "travel")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    again = tool_server.post(
        PATH, {**body, "input": [*MESSAGES, call, result], "tools": [TRAVEL], "max_output_tokens": 2}
    )
    assert again.status_code == 200, again.text
    # A name that occurs twice is shown with its namespace.
    twice = sse(tool_server, {**body, "tools": [TRAVEL, TOOLS[1]], "tool_choice": choice})[-1]["response"]
    assert [(item["name"], item["namespace"]) for item in twice["output"]] == [("get_time", "travel")]
    assert twice["tools"][0]["tools"][0]["name"] == "get_time"


def test_a_custom_tool_is_called_with_a_text(tool_server: RunningServer) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "go"'}
    body: dict[str, Any] = {
        "model": NAME,
        "input": MESSAGES,
        "tools": [{**SHELL, "format": grammar}, *TOOLS],
        "tool_choice": {"type": "custom", "name": "shell"},
        "max_output_tokens": 60,  # A random model does not end its text.
        "seed": 3,
    }
    events = sse(tool_server, body)
    assert in_order(events)[2:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["name"], call["status"]) == ("custom_tool_call", "shell", "incomplete")
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert call["input"] == "".join(deltas) != ""
    reply = tool_server.post(PATH, body)
    assert reply.json()["output"][0]["input"] == call["input"]
    assert reply.headers[HEADER] == "tools[0].format"
    assert prompt_tokens(tool_server, tools=[SHELL]) < prompt_tokens(tool_server, tools=[{**SHELL, "format": grammar}])


def test_custom_calls_of_earlier_responses_can_be_sent_back(tool_server: RunningServer) -> None:
    as_function = {
        "type": "function_call",
        "call_id": "call_3",
        "name": "shell",
        "arguments": json.dumps({"input": CUSTOM_CALL["input"]}),
    }
    result = {**CUSTOM_RESULT, "type": "function_call_output"}
    custom = prompt_tokens(tool_server, input=[*MESSAGES, CUSTOM_CALL, CUSTOM_RESULT])
    assert custom == prompt_tokens(tool_server, input=[*MESSAGES, as_function, result])


def test_a_call_that_was_cut_off_can_be_sent_back(tool_server: RunningServer) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    body: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": choice, "model": NAME, "temperature": 0}
    cut = tool_server.client().responses.create(input=MESSAGES, max_output_tokens=40, **body)
    (call,) = cut.output
    assert (cut.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")
    assert not call.arguments.endswith("}")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "the call was cut off"}
    answer = tool_server.client().responses.create(input=[*MESSAGES, call, result], max_output_tokens=2, **GREEDY)
    assert answer.usage.output_tokens == 2


def test_only_allowed_tools_may_be_called(tool_server: RunningServer) -> None:
    allowed = [{"type": "function", "name": "get_time"}, {"type": "web_search"}]
    choice: dict[str, Any] = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    body: dict[str, Any] = {"input": MESSAGES, "tools": [*TOOLS, SHELL], "tool_choice": choice, "model": NAME}
    answer = tool_server.client().responses.create(parallel_tool_calls=False, **body)
    assert [item.name for item in answer.output] == ["get_time"]
    assert answer.tool_choice.to_dict() == choice
    assert [tool.name for tool in answer.tools] == ["get_weather", "get_time", "shell"]
    none = {"tools": TOOLS, "tool_choice": {**choice, "mode": "auto", "tools": []}}
    assert prompt_tokens(tool_server, **none) == prompt_tokens(tool_server)


def test_tools_may_be_items_of_the_input(tool_server: RunningServer) -> None:
    given = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [TRAVEL, {"type": "web_search"}]}
    body = {"model": NAME, "input": [given, *MESSAGES], "tools": [], "parallel_tool_calls": False}
    reply = tool_server.post(PATH, {**body, "tool_choice": {"type": "function", "name": "get_time"}})
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER] == "input[0].tools[1].web_search"
    assert [(item["name"], item["namespace"]) for item in reply.json()["output"]] == [("get_time", "travel")]


def test_calls_of_other_servers_tools_are_left_out_and_named(tool_server: RunningServer) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    reply = tool_server.post(PATH, {"model": NAME, "input": [*MESSAGES, search], "max_output_tokens": 2})
    assert (reply.status_code, reply.headers[HEADER]) == (200, "input[1].web_search_call")
    assert reply.json()["usage"]["input_tokens"] == prompt_tokens(tool_server, input=MESSAGES)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameter": {}}]}, "tools[0].parameter"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    ({"tools": [flat(CLOCK), flat(CLOCK)]}, "tools[1].name"),
    ({"tools": [flat(CLOCK), {"type": "web_search"}, flat(CLOCK)]}, "tools[2].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
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
