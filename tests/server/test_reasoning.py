"""Reasoning of a model on a real server: separated from the content, counted and limited to the token."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest
from openai.types.responses import Response

from tests.server.expected_errors import expect
from tests.server.response_events import in_order, sse
from tests.server.running_server import NAME, RunningServer
from tests.server.sample_tools import CLOCK, MESSAGES, WEATHER

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "lift", "schema": SCHEMA}}


def token(server: RunningServer, text: str) -> str:
    (found,) = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return str(found)


def request_body(server: RunningServer, budget: int | None = 6, **more: Any) -> dict[str, Any]:
    """A request whose model never ends the reasoning by itself."""
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "seed": 1, "thinking_token_budget": budget}
    bias = {token(server, "</think>"): -100.0, token(server, "<think>"): -100.0}
    return {**body, "ignore_eos": True, "logit_bias": bias, **more}


def complete(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: RunningServer, body: dict[str, Any]) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The joined fields of each choice of a stream, and its usage."""
    answer = server.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices: list[dict[str, str]] = [{} for _ in range(body.get("n", 1))]
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name in ("reasoning_content", "reasoning", "content"):
                piece = choice["delta"].get(name)
                if piece:
                    if name == "reasoning":
                        assert "content" not in choices[choice["index"]], "reasoning comes before the content"
                    choices[choice["index"]][name] = choices[choice["index"]].get(name, "") + piece
    return choices, chunks[-1]["usage"]


def reasoning_tokens(usage: dict[str, Any]) -> int:
    return int(usage["completion_tokens_details"]["reasoning_tokens"])


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_reasoning_is_separate_and_limited_to_the_token(thinking_server: RunningServer, budget: int) -> None:
    body = request_body(thinking_server, budget)
    whole = complete(thinking_server, body)
    message = whole["choices"][0]["message"]
    assert reasoning_tokens(whole["usage"]) == budget
    assert whole["usage"]["completion_tokens"] == 60
    assert message.get("reasoning_content") == message.get("reasoning")
    assert "think>" not in message["content"]
    assert ("reasoning" in message) == bool(budget)
    (choice,), usage = streamed(thinking_server, body)
    assert usage == whole["usage"] | {"prompt_tokens_details": usage["prompt_tokens_details"]}
    assert choice.get("content") == message["content"]
    assert choice.get("reasoning") == choice.get("reasoning_content") == message.get("reasoning")


def test_budgets_of_requests_in_one_batch(thinking_server: RunningServer) -> None:
    """With n > 1, with and without a grammar, streamed and not."""
    cases = [
        request_body(thinking_server, budget, n=n, **more)
        for budget in (2, 5, 11)
        for n in (1, 3)
        for more in ({}, {"response_format": FORMAT, "ignore_eos": False, "max_tokens": 200})
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        whole = list(pool.map(lambda body: complete(thinking_server, body), cases))
        streams = list(pool.map(lambda body: streamed(thinking_server, body), cases))
    for body, answer, (choices, usage) in zip(cases, whole, streams, strict=True):
        assert reasoning_tokens(answer["usage"]) == body["thinking_token_budget"] * body["n"]
        assert reasoning_tokens(usage) == body["thinking_token_budget"] * body["n"]
        for one, choice in zip(answer["choices"], choices, strict=True):
            assert one["message"]["reasoning"] == choice["reasoning"]
            assert one["message"]["content"] == choice["content"]
            if "response_format" in body:
                jsonschema_rs.validate(SCHEMA, json.loads(choice["content"]))


def test_reasoning_that_the_model_begins(thinking_server: RunningServer) -> None:
    bias = {token(thinking_server, "</think>"): -100.0, token(thinking_server, "<think>"): 100.0}
    for more in ({}, {"response_format": FORMAT, "ignore_eos": False, "max_tokens": 200}):
        body = request_body(thinking_server, 4, chat_template_kwargs={"model_begins": True}, **more)
        answer = complete(thinking_server, body | {"logit_bias": bias})
        assert reasoning_tokens(answer["usage"]) == 4
        message = answer["choices"][0]["message"]
        assert message["reasoning"]
        if more:
            jsonschema_rs.validate(SCHEMA, json.loads(message["content"]))


def test_forced_calls_come_after_the_reasoning(thinking_server: RunningServer) -> None:
    tools = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    body = request_body(thinking_server, 5, max_tokens=300, **tools)
    answer = complete(thinking_server, body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"]
    (call,) = choice["message"]["tool_calls"]
    if call["function"]["name"] == "get_weather":
        jsonschema_rs.validate(WEATHER["function"]["parameters"], json.loads(call["function"]["arguments"]))
    assert reasoning_tokens(answer["usage"]) == 5


def test_reasoning_can_be_switched_off(thinking_server: RunningServer) -> None:
    cases: list[dict[str, Any]] = [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}]
    answers = [complete(thinking_server, request_body(thinking_server, **case)) for case in cases]
    on = complete(thinking_server, request_body(thinking_server, reasoning_effort="high"))
    for answer in answers:
        assert "reasoning" not in answer["choices"][0]["message"]
        assert reasoning_tokens(answer["usage"]) == 0
        assert answer["usage"]["prompt_tokens"] > on["usage"]["prompt_tokens"]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert reasoning_tokens(on["usage"]) == 6


def test_reasoning_can_be_left_out_of_the_response(thinking_server: RunningServer) -> None:
    body = request_body(thinking_server)
    message = complete(thinking_server, body)["choices"][0]["message"]
    without = complete(thinking_server, body | {"include_reasoning": False})
    assert without["choices"][0]["message"] == {"role": "assistant", "content": message["content"], "refusal": None}
    assert reasoning_tokens(without["usage"]) == 6
    (choice,), _ = streamed(thinking_server, body | {"include_reasoning": False})
    assert choice == {"content": message["content"]}


def test_truncated_reasoning_has_no_content(thinking_server: RunningServer) -> None:
    answer = complete(thinking_server, request_body(thinking_server, None, max_tokens=7))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"
    assert reasoning_tokens(answer["usage"]) == 7


def test_reasoning_of_earlier_messages_goes_to_the_template(thinking_server: RunningServer) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [*MESSAGES, {"role": "assistant", "content": "Hm.", name: "an old thought"}, *MESSAGES]
        tokens = thinking_server.post("/tokenize", {"messages": messages}).json()["tokens"]
        assert "an old thoughtHm." in thinking_server.post("/detokenize", {"tokens": tokens}).text


def test_reasoning_items_of_responses(thinking_server: RunningServer) -> None:
    body = request_body(thinking_server, 6)
    del body["messages"], body["max_tokens"]
    body |= {"input": "When?", "max_output_tokens": 40, "reasoning": {"effort": "low"}}
    answer = thinking_server.post("/v1/responses", body).json()
    Response.model_validate(answer)
    reasoning, message = answer["output"]
    assert (reasoning["type"], message["type"]) == ("reasoning", "message")
    assert reasoning["content"][0]["text"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 6
    assert answer["reasoning"]["effort"] == "low"
    events = sse(thinking_server, body)
    assert in_order(events)[2:8] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    assert deltas == reasoning["content"][0]["text"]
    assert events[-1]["response"]["output"][0]["content"] == reasoning["content"]
    # The items are sent back with another question.
    user = {"role": "user", "content": "Why?"}
    again = thinking_server.post("/v1/responses", body | {"input": [user, reasoning, message, user]})
    assert again.status_code == 200, again.text
    without = thinking_server.post("/v1/responses", body | {"input": [user, message, user]})
    assert again.json()["usage"]["input_tokens"] > without.json()["usage"]["input_tokens"]


SWITCHES: list[tuple[dict[str, Any], bool]] = [  # whether they ask for reasoning
    ({"reasoning_effort": "none"}, False),
    ({"enable_thinking": False}, False),
    ({"thinking": False}, False),
    ({"thinking": {"type": "disabled"}}, False),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"chat_template_kwargs": {"thinking": False}}, False),
    ({"reasoning_effort": "high"}, True),
    ({"enable_thinking": True}, True),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, True),
    ({"chat_template_kwargs": {"thinking": True}}, True),
]


@pytest.mark.parametrize(("switch", "asks"), SWITCHES)
def test_switches_for_reasoning_work_or_are_satisfied(
    server: RunningServer, thinking_server: RunningServer, switch: dict[str, Any], asks: bool
) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 2}
    response = server.post("/v1/chat/completions", body | switch)  # its template has no reasoning
    assert response.status_code == 200, response.text
    assert ("x-chairlift-ignored-fields" in response.headers) == (asks and "chat_template_kwargs" not in switch)
    asked = thinking_server.post("/v1/chat/completions", body | switch)
    assert asked.status_code == 200, asked.text
    plain = {"reasoning_effort": "medium" if asks else "none"}
    same = thinking_server.post("/v1/chat/completions", body | plain)
    assert asked.json()["usage"]["prompt_tokens"] == same.json()["usage"]["prompt_tokens"]
    assert "x-chairlift-ignored-fields" not in asked.headers


def test_parameters_without_effect_are_refused(server: RunningServer, thinking_server: RunningServer) -> None:
    base = {"model": NAME, "messages": MESSAGES, "max_tokens": 2}
    for where, more, parameter in (
        (server, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (thinking_server, {"thinking_token_budget": -1}, "thinking_token_budget"),
        (thinking_server, {"reasoning_effort": "huge"}, "reasoning_effort"),
    ):
        expect(where, where.post("/v1/chat/completions", base | more), 400, parameter, "invalid_value")
    completions = thinking_server.post(
        "/v1/completions", {"model": NAME, "prompt": "so <think>", "thinking_token_budget": 2, "max_tokens": 9}
    )
    assert completions.status_code == 200
