"""/v1/responses with the real OpenAI client, and its wire format."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from chairlift.server.responses.types import ResponsesRequest
from chairlift.server.wire.unknown_fields import HEADER
from tests.server import openai_document
from tests.server.response_events import PATH, in_order, sse
from tests.server.running_server import NAME, RunningServer, wait_for

GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
QUESTION = "when does the lift stop?"
MESSAGE_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]


class Lift(BaseModel):
    """A schema short enough for a random model to complete."""

    side: Literal["north", "south"]
    open: bool


def test_a_whole_response(server: RunningServer) -> None:
    answer = server.client().responses.create(
        input=QUESTION, max_output_tokens=12, metadata={"trip": "7"}, instructions="be brief", **GREEDY
    )
    Response.model_validate(answer.to_dict())  # the official type
    openai_document.check_response(answer.to_dict())
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.model, answer.metadata) == ("response", NAME, {"trip": "7"})
    assert answer.instructions == "be brief"
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    (message,) = answer.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12


def test_a_response_has_the_same_tokens_as_a_chat(server: RunningServer) -> None:
    client = server.client()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(messages=messages, max_tokens=16, **GREEDY)
    request_bodies: list[dict[str, Any]] = [
        {"input": QUESTION, "instructions": "be brief"},
        {"input": messages},
        {"input": [{"role": "developer", "content": "be brief"}, {"type": "message", **messages[1]}]},
        {"input": [messages[0], {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]},
    ]
    for how in request_bodies:
        answer = client.responses.create(max_output_tokens=16, **how, **GREEDY)
        assert answer.output_text == chat.choices[0].message.content
        assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_output_items_can_be_sent_back_as_input(server: RunningServer) -> None:
    client = server.client()
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(input=items, max_output_tokens=6, **GREEDY)
    items += [*first.output, {"role": "user", "content": "and then?"}]
    second = client.responses.create(input=items, max_output_tokens=6, **GREEDY)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then?"},
    ]
    chat = client.chat.completions.create(messages=messages, max_tokens=6, **GREEDY)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_stream_adds_up_to_the_whole_response(server: RunningServer) -> None:
    whole = server.client().responses.create(input=QUESTION, max_output_tokens=20, **GREEDY)
    body = {"model": NAME, "input": QUESTION, "max_output_tokens": 20, "temperature": 0, "ignore_eos": True}
    events = sse(server, {**body, "stream_options": {"include_usage": True, "include_obfuscation": False}})
    assert in_order(events) == MESSAGE_EVENTS
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(event["delta"] for event in deltas) == whole.output_text
    by_type = {event["type"]: event for event in events}
    assert by_type["response.output_text.done"]["text"] == whole.output_text
    last = by_type["response.incomplete"]["response"]
    assert last["output"] == [by_type["response.output_item.done"]["item"]]
    assert last["output"][0]["content"][0]["text"] == whole.output_text
    assert last["usage"]["output_tokens"] == 20
    added = by_type["response.output_item.added"]["item"]
    assert (added["status"], added["content"]) == ("in_progress", [])
    assert {event["item_id"] for event in deltas} == {added["id"]}
    first = by_type["response.created"]["response"]
    assert (first["id"], first["status"], first["usage"], first["output"]) == (last["id"], "in_progress", None, [])


def test_stream_helpers_of_the_client(server: RunningServer) -> None:
    client = server.client()
    whole = client.responses.create(input=QUESTION, max_output_tokens=20, **GREEDY)
    stop = whole.output_text[6:8]
    request_body = {**GREEDY, "extra_body": {"ignore_eos": True, "stop": stop}}
    with client.responses.stream(input=QUESTION, max_output_tokens=20, **request_body) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.incomplete_details is None
    assert final.output[0].status == "completed"
    assert final.output_text == "".join(texts) == whole.output_text[: whole.output_text.index(stop)]


def test_concurrent_streams_get_their_own_responses(server: RunningServer) -> None:
    async def read(client: openai.AsyncOpenAI, index: int) -> str:
        stream = await client.responses.create(input=f"number {index}", max_output_tokens=8, stream=True, **GREEDY)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
            return await asyncio.gather(*(read(client, index) for index in range(20)))

    client = server.client()
    for index, text in enumerate(asyncio.run(all_of_them())):
        assert text == client.responses.create(input=f"number {index}", max_output_tokens=8, **GREEDY).output_text
    server.wait_idle()


@pytest.mark.parametrize("logprob_options", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_logprobs(server: RunningServer, logprob_options: dict[str, Any]) -> None:
    client = server.client()
    answer = client.responses.create(input=QUESTION, max_output_tokens=6, **logprob_options, **GREEDY)
    scores = answer.output[0].content[0].logprobs
    assert len(scores) == 6
    assert all(len(entry.top_logprobs) == logprob_options.get("top_logprobs", 0) for entry in scores)
    stream = client.responses.create(input=QUESTION, max_output_tokens=6, stream=True, **logprob_options, **GREEDY)
    result = [entry for event in stream if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in result] == [entry.logprob for entry in scores]
    plain = client.responses.create(input=QUESTION, max_output_tokens=6, **GREEDY)
    assert plain.output[0].content[0].logprobs == []


def test_parsed_responses(server: RunningServer) -> None:
    client = server.client()
    answer = client.responses.parse(input=QUESTION, text_format=Lift, model=NAME, temperature=0)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Lift)
    with client.responses.stream(input=QUESTION, text_format=Lift, model=NAME, temperature=0) as stream:
        done = [event.parsed for event in stream if event.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == answer.output_parsed
    assert done == [answer.output_parsed]
    # The client also sends back the parsed object, which must not change the prompt.
    again = client.responses.create(input=[*answer.output, {"role": "user", "content": "?"}], model=NAME, top_p=0.5)
    assert again.usage.input_tokens > answer.usage.output_tokens


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_structured_output_is_the_same_as_in_a_chat(server: RunningServer, kind: str) -> None:
    named = {"name": "lift", "schema": Lift.model_json_schema(), "strict": True, "description": "a lift"}
    there, here = ({"json_schema": named}, named) if kind == "json_schema" else ({}, {})
    request_body: dict[str, Any] = {"model": NAME, "temperature": 0}
    most = 16 if kind == "json_object" else None  # this model never ends the object
    messages = [{"role": "user", "content": QUESTION}]
    structured = {"messages": messages, "max_tokens": most, "response_format": {"type": kind, **there}}
    chat = server.post("/v1/chat/completions", request_body | structured).json()
    structured = {"input": QUESTION, "max_output_tokens": most, "text": {"format": {"type": kind, **here}}}
    answer = server.post(PATH, request_body | structured).json()
    (item,) = answer["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert answer["text"]["format"] == {"type": kind, **here}


def test_an_empty_output_is_a_message(server: RunningServer) -> None:
    whole = server.client().responses.create(input=QUESTION, max_output_tokens=4, **GREEDY).output_text
    body = {"model": NAME, "input": QUESTION, "temperature": 0, "ignore_eos": True, "stop": whole[0]}
    (item,) = server.post(PATH, body).json()["output"]
    assert (item["status"], item["content"][0]["text"]) == ("completed", "")
    assert in_order(sse(server, body)) == [
        *(kind for kind in MESSAGE_EVENTS[:-1] if kind != "response.output_text.delta"),
        "response.completed",
    ]


def test_documented_parameters_are_accepted(server: RunningServer) -> None:
    nulls = dict.fromkeys(ResponsesRequest.model_fields.keys() - {"model", "input", "max_output_tokens"})
    plain: dict[str, Any] = {
        "background": False,
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "max_tool_calls": 3,
        "client_metadata": {"session": "7"},
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "truncation": "auto",
        "service_tier": "priority",
        "safety_identifier": "someone",
        "prompt_cache_key": "chat-7",
        "user": "someone",
    }
    for extra in (nulls, plain):
        reply = server.post(PATH, {"model": NAME, "input": "hello", "max_output_tokens": 2, **extra})
        assert reply.status_code == 200, reply.text
        assert HEADER not in reply.headers
    echoed = Response.model_validate(reply.json(), strict=True)
    # What is true: nothing is stored, and there is one tier.
    assert (echoed.store, echoed.service_tier, echoed.truncation, echoed.max_tool_calls) == (
        False,
        "default",
        "auto",
        3,
    )
    assert (echoed.prompt_cache_key, echoed.safety_identifier) == ("chat-7", "someone")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "max"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"store": True}, "store"),  # The server of these tests has no folder for responses.
    ],
)
def test_parameters_without_effect_are_named(server: RunningServer, change: dict[str, Any], named: str) -> None:
    reply = server.post(PATH, {"model": NAME, "input": "hello", "max_output_tokens": 2, **change})
    assert (reply.status_code, reply.headers.get(HEADER)) == (200, named), reply.text


def prompt_tokens(server: RunningServer, **body: Any) -> int:
    reply = server.post(f"{PATH}/input_tokens", {"model": NAME, **body})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["input_tokens"])


def test_input_may_be_a_list_of_parts(server: RunningServer) -> None:
    parts = [{"type": "input_text", "text": "when does"}, {"type": "input_text", "text": "the lift stop?"}]
    message = {"role": "user", "content": "when does\nthe lift stop?"}
    assert prompt_tokens(server, input=parts) == prompt_tokens(server, input=[message])
    around = [message, {"role": "assistant", "content": "now"}]
    assert prompt_tokens(server, input=[*around, *parts]) == prompt_tokens(server, input=[*around, message])


def test_refusals_of_earlier_responses_can_be_sent_back(server: RunningServer) -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    plain = {"role": "assistant", "content": "no"}
    items = [{"role": "user", "content": QUESTION}, plain, {"role": "user", "content": "why?"}]
    assert prompt_tokens(server, input=[items[0], refusal, items[2]]) == prompt_tokens(server, input=items)


def test_a_long_conversation_is_shortened_from_its_beginning(server: RunningServer) -> None:
    system = {"role": "system", "content": "be brief"}
    turns = [[{"role": "user", "content": "word " * 20}, {"role": "assistant", "content": "yes"}] for _ in range(8)]
    question = {"role": "user", "content": QUESTION}
    body = {"model": NAME, "input": [system, *chain(*turns), question], "max_output_tokens": 8, "temperature": 0}
    refused = server.post(PATH, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = server.post(PATH, body | {"truncation": "auto"}).json()
    sizes = [prompt_tokens(server, input=[system, *chain(*turns[cut:]), question]) for cut in range(9)]
    assert answer["usage"]["input_tokens"] == max(size for size in sizes if size + 8 <= 256)
    # In one turn with many calls, the calls are dropped in whole.
    calls = [
        [
            {"type": "function_call", "call_id": f"call_{index}", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"call_{index}", "output": "word " * 20},
        ]
        for index in range(8)
    ]
    reply = server.post(PATH, body | {"input": [system, question, *chain(*calls)], "truncation": "auto"})
    assert reply.status_code == 200, reply.text
    # What cannot be shortened enough is refused.
    reply = server.post(
        PATH, body | {"input": [system, {"role": "user", "content": "word " * 400}], "truncation": "auto"}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_disconnected_client_is_cancelled(server: RunningServer) -> None:
    body = {"model": NAME, "input": QUESTION, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + PATH, json=body, timeout=60) as response:
        next(response.iter_bytes(chunk_size=64))
    wait_for(lambda: server.metric("chairlift_requests_open") == 0, "the request to be cancelled")
    with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + PATH, json={**body, "stream": False}, timeout=0.05)
    wait_for(lambda: server.metric("chairlift_requests_open") == 0, "the request to be cancelled")
    server.wait_idle()


def test_errors_before_the_first_event_have_a_status(server: RunningServer) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=NAME, input=QUESTION, temperature=-1, stream=True)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="other", input=QUESTION, stream=True)
    assert missing.value.param == "model"
    late = server.post(PATH, {"model": NAME, "input": QUESTION, "stream": True, "timeout": 1e-4})
    assert (late.status_code, late.json()["error"]["type"]) == (408, "timeout_error")
