"""Function tools through /v1/responses, with the real client and the real server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import NAME, RunningServer
from tests.serving.offered import ASK, CLOCK, WEATHER

PATH = "/v1/responses"
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of the chat API as this one writes it."""
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


def test_calls_and_results_are_told_as_in_a_chat(tool_server: RunningServer) -> None:
    client = tool_server.client()
    said = {"role": "assistant", "content": "let me look"}
    for words in ([said], []):
        answer = client.responses.create(
            input=[*ASK, *words, CALL, SECOND, *RESULTS], tools=TOOLS, max_output_tokens=6, **GREEDY
        )
        turn = {"role": "assistant", "content": "", **(said if words else {})}
        talk: list[Any] = [
            *ASK,
            turn | {"tool_calls": [chat_call(CALL), chat_call(SECOND)]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        ]
        chat = client.chat.completions.create(messages=talk, tools=[WEATHER, CLOCK], max_tokens=6, **GREEDY)
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.output_text == chat.choices[0].message.content


def test_the_answer_says_what_was_offered(tool_server: RunningServer) -> None:
    asked: dict[str, Any] = {"input": "hello", "tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False}
    answer = tool_server.client().responses.create(max_output_tokens=2, **asked, **GREEDY)
    assert [tool.name for tool in answer.tools] == ["get_weather", "get_time"]
    assert answer.tools[0].parameters == TOOLS[0]["parameters"]
    assert (answer.tool_choice, answer.parallel_tool_calls) == ("none", False)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "f", "colour": 1}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools"),
    ({"tools": [flat(CLOCK), flat(CLOCK)]}, "tools"),
    ({"tools": [flat(CLOCK), {"type": "code_interpreter"}]}, "tools[1].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "get_time"}}, "tool_choice"),
    ({"input": [*ASK, CALL | {"arguments": "{"}]}, "input[1].arguments"),
    ({"input": [*ASK, CALL, RESULTS[1]]}, "input[2].call_id"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=lambda value: ascii(value)[:60])
def test_bad_requests(tool_server: RunningServer, change: dict[str, Any], param: str) -> None:
    response = tool_server.post(PATH, {"model": NAME, "input": "hello", **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert ".function." not in error["message"]
