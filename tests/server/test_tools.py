"""Tools through the real client and the real server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.running_server import NAME, RunningServer
from tests.server.sample_tools import CLOCK, MESSAGES, WEATHER

CHAT = "/v1/chat/completions"
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": 3}, "tools", "invalid_type"),
    ({"tools": [3]}, "tools[0]", "invalid_type"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_value"),
    ({"tools": [function(name="a b")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [function(name="x" * 129)]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [function(name=None)]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [function(description="\ud800")]}, "tools", "invalid_value"),
    ({"tools": [function(strict=1)]}, "tools[0].function.strict", "invalid_type"),
    ({"tools": [function(descripton=1)]}, "tools[0].function.descripton", "unknown_parameter"),
    ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters", "invalid_value"),
    (
        {"tools": [function(parameters={"description": "x" * 70_000})]},
        "tools[0].function.parameters",
        "invalid_value",
    ),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [function(name=f"f{i}") for i in range(129)]}, "tools", "invalid_value"),
    ({"tools": [function(name=f"f{i}", description="x" * 10_000) for i in range(60)]}, "tools", "invalid_value"),
    ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice", "invalid_value"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
    ({"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice", "invalid_value"),
    ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": NAMED}, "tool_choice", "invalid_value"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [CLOCK], "guided_regex": "a+"}, "guided_regex", "invalid_value"),
    ({"tools": [CLOCK], "structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
    ({"tools": [CLOCK], "response_format": {"type": "poem"}}, "response_format.type", "invalid_value"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", "invalid_value"),
    ({"tools": [CLOCK], "parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
    ({"functions": [{"name": "f"}]}, "functions", "invalid_value"),
    ({"function_call": "auto"}, "function_call", "invalid_value"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "invalid_value"),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls", "invalid_value"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages[0].tool_calls[0].function",
        "invalid_value",
    ),
    ({"messages": [{"role": "tool", "tool_call_id": "x", "content": None}]}, "messages[0].content", "invalid_value"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "param", "code"), BAD, ids=lambda value: ascii(value)[:60])
def test_invalid_tools_are_refused(
    tool_server: RunningServer, change: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    response = tool_server.post(CHAT, {"model": NAME, "messages": MESSAGES, "stream": stream, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert "Traceback" not in error["message"]


def test_no_blocks_or_requests_remain(tool_server: RunningServer) -> None:
    assert tool_server.get("/health").status_code == 200
    tool_server.wait_idle()


def test_auto_may_return_text(tool_server: RunningServer) -> None:
    client = tool_server.client()
    request_body = {"model": NAME, "messages": MESSAGES, "tools": [WEATHER, CLOCK], "max_tokens": 8, "temperature": 0}
    for choice in ("auto", "none"):
        whole = client.chat.completions.create(tool_choice=choice, **request_body).choices[0]
        assert whole.message.content
        assert whole.message.tool_calls is None
        assert whole.finish_reason in ("stop", "length")
        chunks = list(client.chat.completions.create(tool_choice=choice, stream=True, **request_body))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
        assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def prompt_tokens(server: RunningServer, **body: Any) -> int:
    answer = server.post(CHAT, {"model": NAME, "messages": MESSAGES, "max_tokens": 1, **body}).json()
    return int(answer["usage"]["prompt_tokens"])


def test_the_prompt_contains_the_tools_unless_the_choice_is_none(tool_server: RunningServer) -> None:
    without = prompt_tokens(tool_server)
    assert prompt_tokens(tool_server, tools=[WEATHER]) > without + 50
    assert prompt_tokens(tool_server, tools=[WEATHER], tool_choice="none") == without
    assert prompt_tokens(tool_server, tools=[]) == without
    counted = tool_server.post("/tokenize", {"messages": MESSAGES, "tools": [WEATHER]}).json()["count"]
    assert counted == prompt_tokens(tool_server, tools=[WEATHER])
    assert tool_server.post("/tokenize", {"prompt": "x", "tools": [WEATHER]}).json()["error"]["param"] == "tools"


def test_tools_are_described_in_the_prompt_if_the_template_does_not_show_them(server: RunningServer) -> None:
    counted: list[dict[str, Any]] = [
        server.post("/tokenize", {"messages": MESSAGES, "tools": tools}).json() for tools in ([], [CLOCK])
    ]
    result = server.post("/detokenize", {"tokens": counted[1]["tokens"]}).json()["prompt"]
    assert "get_time" in result
    assert '<tool_call>\n{"name": "function_name"' in result
    assert counted[1]["count"] > counted[0]["count"] + 100
