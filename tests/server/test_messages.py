"""/v1/messages with the real Anthropic client, and its wire format."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.running_server import HTTP, NAME, RunningServer

PATH = "/v1/messages"
QUESTION: list[Any] = [{"role": "user", "content": "when does the lift stop?"}]
GREEDY: dict[str, Any] = {"model": NAME, "extra_body": {"ignore_eos": True, "temperature": 0}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bern"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}


SEARCH: dict[str, Any] = {
    "type": "search_result",
    "source": "https://lifts.example",
    "title": "The lifts",
    "content": [{"type": "text", "text": "All are open."}],
}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def client_of(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        kind, data = (line.partition(": ")[2] for line in block.split("\n"))
        events.append(json.loads(data))
        assert events[-1]["type"] == kind
    return events


def test_a_whole_message(server: RunningServer) -> None:
    message = client_of(server).messages.create(messages=QUESTION, max_tokens=12, system="be brief", **GREEDY)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", NAME)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert [block.type for block in message.content] == ["text"]
    assert message.usage.output_tokens == 12


def test_a_message_has_the_same_tokens_as_a_chat(server: RunningServer) -> None:
    client = client_of(server)
    blocks: list[Any] = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(messages=QUESTION, max_tokens=12, system=blocks, **GREEDY)
    chat = server.client().chat.completions.create(
        messages=[{"role": "system", "content": "be brief"}, *QUESTION], max_tokens=12, **GREEDY
    )
    assert message.content[0].type == "text"
    assert message.content[0].text == chat.choices[0].message.content
    assert chat.usage is not None
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == chat.usage.prompt_tokens
    count = client.messages.count_tokens(messages=QUESTION, system="be brief", model=NAME)
    assert count.input_tokens == chat.usage.prompt_tokens


def test_a_stream_has_the_events_that_the_client_reads(server: RunningServer) -> None:
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = server.post(PATH, body).json()
    events = events_of(server.post(PATH, body | {"stream": True}))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == whole["content"][0]["text"]
    with client_of(server).messages.stream(messages=QUESTION, max_tokens=8, **GREEDY) as stream:
        assert "".join(stream.text_stream) == whole["content"][0]["text"]
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_stop_sequences_end_a_message(server: RunningServer) -> None:
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = server.post(PATH, body).json()["content"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    message = server.post(PATH, body | {"stop_sequences": [stop]}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]


def test_a_last_message_of_the_assistant_is_continued(server: RunningServer) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "It stops at"}]
    message = client_of(server).messages.create(messages=begun, max_tokens=6, **GREEDY)
    chat = server.client().chat.completions.create(
        messages=begun,
        max_tokens=6,
        model=NAME,
        temperature=0,
        extra_body={"ignore_eos": True, "continue_final_message": True, "add_generation_prompt": False},
    )
    assert message.content[0].type == "text"
    assert message.content[0].text == chat.choices[0].message.content


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}]
)
def test_a_forced_tool_is_used(tool_server: RunningServer, choice: Any) -> None:
    message = client_of(tool_server).messages.create(
        model=NAME, messages=QUESTION, max_tokens=400, tools=[WEATHER], tool_choice=choice, extra_body={"seed": 1}
    )
    assert message.stop_reason == "tool_use"
    call = message.content[0]
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert set(call.input) == {"city", "days"}
    result: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    answer = client_of(tool_server).messages.create(messages=result, max_tokens=5, tools=[WEATHER], **GREEDY)
    assert answer.usage.output_tokens == 5


def test_the_input_of_a_tool_is_streamed(tool_server: RunningServer) -> None:
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 200, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    body["tool_choice"] |= {"disable_parallel_tool_use": True}
    events = events_of(tool_server.post(PATH, body | {"stream": True}))
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(block["type"], block["name"], block["input"]) for block in begun] == [("tool_use", "get_weather", {})]
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert set(json.loads("".join(pieces))) == {"city", "days"}


def test_an_output_format_is_enforced(server: RunningServer) -> None:
    schema: Any = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]}
    schema["additionalProperties"] = False
    message = client_of(server).messages.create(
        model=NAME,
        messages=QUESTION,
        max_tokens=100,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert message.content[0].type == "text"
    assert set(json.loads(message.content[0].text)) == {"open"}


def test_thinking_is_a_block_of_its_own_and_its_budget_is_kept(thinking_server: RunningServer) -> None:
    (mark,) = thinking_server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 30, "seed": 1, "ignore_eos": True}
    body |= {"logit_bias": {str(mark): -100.0}, "thinking": {"type": "enabled", "budget_tokens": 6}}
    message = thinking_server.post(PATH, body).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    chat = {name: value for name, value in body.items() if name != "thinking"} | {"thinking_token_budget": 6}
    (choice,) = thinking_server.post("/v1/chat/completions", chat).json()["choices"]
    assert message["content"][0]["thinking"] == choice["message"]["reasoning_content"]
    assert message["content"][1]["text"] == choice["message"]["content"]
    silent = thinking_server.post(PATH, body | {"thinking": {"type": "disabled"}}).json()
    assert [block["type"] for block in silent["content"]] == ["text"]
    events = events_of(thinking_server.post(PATH, body | {"stream": True}))
    deltas = {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"}
    assert deltas == {"thinking_delta", "signature_delta", "text_delta"}
    again = [*QUESTION, {"role": "assistant", "content": message["content"]}, *QUESTION]
    assert thinking_server.post(PATH, body | {"messages": again}).status_code == 200


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*QUESTION, {"role": "system"}]}, "messages[1].content"),
    ({"messages": [*QUESTION, {"role": "system", "content": "x", "clear_at": "noon"}]}, "messages[1].clear_at"),
    ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].source.type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [user({"type": "document", "source": {"type": "url"}})]}, "messages[0].content[0].source.type"),
    ({"messages": [user(SEARCH | {"citations": {"enabled": True}})]}, "messages[0].content[0].citations.enabled"),
    ({"messages": [user({"type": "tool_reference", "tool_name": "f"})]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "contents": "y"}]}, "messages[0].contents"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop": ["x"]}, "stop"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools[0].type"),
    ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
    ({"tools": [WEATHER | {"allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools"),
    ({"tools": [{"name": "f", "input_schema": {"type": 3}}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"effort": "endless"}}, "output_config.effort"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"fallback_credit_token": "t"}, "fallback_credit_token"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"context_management": {"edits": [{"type": "forget"}]}}, "context_management.edits[0].type"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 3}]}}, "context_management.edits"),
    ({"temperature": -1}, "temperature"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    ({"max_token": 1}, "max_token"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[f"{named}-{index}" for index, (_, named) in enumerate(BAD)])
def test_bad_requests_are_refused_in_anthropics_format(
    server: RunningServer, change: dict[str, Any], named: str
) -> None:
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 4} | change
    answer = server.post(PATH, {name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert found["error"]["message"].startswith(named), found


def test_other_errors_have_anthropics_types(server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client_of(server).messages.create(model="other", messages=QUESTION, max_tokens=4)
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["request_id"] == missing.value.request_id
    assert HTTP.get(server.url + PATH).json()["type"] == "error"
    assert server.post("/v1/messagesx", {}).status_code == 404


def test_models_have_anthropics_form_for_its_clients(server: RunningServer) -> None:
    client = client_of(server)
    (listed,) = client.models.list()
    one = client.models.retrieve(NAME)
    assert listed == one
    assert (one.id, one.display_name, one.type, one.lifecycle) == (NAME, NAME, "model", "active")
    (plain,) = server.get("/v1/models").json()["data"]
    assert one.created_at.timestamp() == plain["created"]
    assert one.max_input_tokens == plain["max_model_len"]
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")
