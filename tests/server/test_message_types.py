"""Every body and event of /v1/messages has the fields, types and order that the anthropic package declares."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic import types
from anthropic.types import beta
from anthropic.types.shared import ErrorResponse

from chairlift.core.request import RequestLimits
from chairlift.server.access import KeySources, KeyTable
from chairlift.server.anthropic.endpoint import MessagesGeneration
from chairlift.server.anthropic.types import MessagesRequest
from chairlift.server.generation.usage import Usage
from chairlift.server.http.boundary import RequestBoundary
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import Loaded, Submit, ToEngine, Update
from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import NAME, FrontEnd, ScriptedEngine, front_end
from tests.server.running_server import HTTP
from tests.server.sample_tools import THINKING_TEMPLATE
from tests.server.test_messages import WEATHER, events_of
from tests.tiny import byte_level_tokenizer

PATH = "/v1/messages"
LOADED = Loaded(RequestLimits(vocab_size=320, max_model_len=2048), max_batch_requests=8)
EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
BODY: dict[str, Any] = {
    "model": NAME,
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [WEATHER],
    "context_management": EDITS,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
REPLIES: dict[str, tuple[list[str], dict[str, Any], tuple[str, str | None], list[str]]] = {
    # The text, how the engine ends it, the message's stop_reason and stop_sequence, and its blocks.
    "text": (["Hm.</think>", "It ", "is open."], {"finish_reason": "stop"}, ("end_turn", None), ["thinking", "text"]),
    "nothing": ([""], {"finish_reason": "stop"}, ("end_turn", None), []),
    "thinking": (["Let me ", "see"], {"finish_reason": "length"}, ("max_tokens", None), ["thinking"]),
    "tool": (
        ["Hm.</think>I ask. ", *CALL],
        {"finish_reason": "stop"},
        ("tool_use", None),
        ["thinking", "text", "tool_use"],
    ),
    "cut tool": (
        ["Hm.</think>", CALL[:70]],
        {"finish_reason": "length"},
        ("max_tokens", None),
        ["thinking", "tool_use"],
    ),
    "stop sequence": (
        ["Hm.</think>yes"],
        {"finish_reason": "stop", "stop_reason": "END"},
        ("stop_sequence", "END"),
        ["thinking", "text"],
    ),
}


def reply(engine: ScriptedEngine, message: ToEngine) -> None:
    """Answers with the reply that the user's last word names, or fails after the first words."""
    if isinstance(message, Submit):
        engine.publish(Update(message.request_id, cached_tokens=0))
        pieces, end, _, _ = REPLIES[engine.reply] if engine.reply in REPLIES else REPLIES["text"]  # type: ignore[attr-defined]
        for piece in pieces:
            engine.publish(Update(message.request_id, text=piece, tokens=[5]))
        end = {"finish_reason": "error"} if engine.reply == "error" else end  # type: ignore[attr-defined]
        engine.publish(Update(message.request_id, tokens=[2], **end), after=0.05)


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer = Tokenizer(byte_level_tokenizer(more_special=marks), chat_template=THINKING_TEMPLATE)
    with front_end(reply, tokenizer=tokenizer, loaded=LOADED) as running:
        yield running


def post(front: FrontEnd, path: str = PATH, **change: Any) -> httpx.Response:
    return HTTP.post(front.url + path, json=BODY | change)


def checked(kind: Any, value: Any) -> Any:
    """Validate against a type of the package, without conversions; each field must be one that it declares."""
    found = pydantic.TypeAdapter(kind).validate_python(value, strict=True)
    assert not list(_extras(found)), (kind, list(_extras(found)))
    return found


def _extras(found: Any) -> Iterator[str]:
    if isinstance(found, pydantic.BaseModel):
        yield from found.model_extra or ()
        for name in type(found).model_fields:
            yield from _extras(getattr(found, name))
    elif isinstance(found, list):
        for item in found:
            yield from _extras(item)


def check_order(events: list[dict[str, Any]]) -> None:
    """message_start, then blocks one after another, then message_delta and message_stop."""
    assert [event["type"] for event in events[:1] + events[-2:]] == ["message_start", "message_delta", "message_stop"]
    open_block, next_block = None, 0
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (open_block, event["index"]) == (None, next_block)
            open_block, next_block = event["index"], next_block + 1
        else:
            assert event["index"] == open_block
            if event["type"] == "content_block_stop":
                open_block = None
    assert open_block is None


@pytest.mark.parametrize("name", REPLIES)
def test_bodies_and_events_have_the_declared_types(front: FrontEnd, name: str) -> None:
    front.engine.reply = name  # type: ignore[attr-defined]
    _, _, ending, kinds = REPLIES[name]
    answer = post(front)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    message = checked(beta.BetaMessage, answer.json())
    assert (message.stop_reason, message.stop_sequence) == ending
    assert [block.type for block in message.content] == kinds
    assert message.context_management.applied_edits == []
    plain = post(front, context_management=None).json()
    checked(types.Message, plain)
    streamed = post(front, stream=True)
    assert streamed.headers["request-id"]
    events = events_of(streamed)
    for event in events:
        checked(beta.BetaRawMessageStreamEvent, event)
    for event in events_of(post(front, stream=True, context_management=None)):
        checked(types.RawMessageStreamEvent, event)
    check_order(events)
    assert events[-2]["delta"] == {"stop_reason": ending[0], "stop_sequence": ending[1]}
    assert events[-2]["usage"] == answer.json()["usage"]
    # The client's own accumulation of the events is the whole message.
    client = anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0)
    arguments: dict[str, Any] = {name: value for name, value in BODY.items() if name != "context_management"}
    with client.messages.stream(**arguments) as stream:
        final = stream.get_final_message()
    cut = name == "cut tool"  # of which the client keeps what it could parse
    assert [block.type for block in final.content] == kinds
    for block, whole in zip(final.content, plain["content"], strict=True):
        found = block.model_dump(exclude_unset=True)
        assert cut or {field: found[field] for field in whole if field != "id"} == {
            field: value for field, value in whole.items() if field != "id"
        }


def test_the_input_of_a_tool_is_streamed_in_pieces(front: FrontEnd) -> None:
    model = front.service.model
    generation = MessagesGeneration(MessagesRequest(**BODY), model, "req-1")
    builder = generation.tokenize(2048).reply("msg_1", ["r"], Usage())
    text = "Hm.</think>" + CALL
    updates = [Update("r", text=text[at : at + 10], tokens=[5]) for at in range(0, len(text), 10)]
    events = [event for update in updates for event in builder.events(update)]
    pieces = [piece for event in events for piece in re.findall(rb'"partial_json":("(?:[^"\\]|\\.)*")', event)]
    assert len(pieces) > 2
    assert json.loads("".join(json.loads(piece) for piece in pieces)) == {"city": "Oslo", "days": 2}


def test_thinking_is_left_out_if_its_display_is_omitted(front: FrontEnd) -> None:
    front.engine.reply = "tool"  # type: ignore[attr-defined]
    thinking = {"type": "adaptive", "display": "omitted"}
    block = post(front, thinking=thinking).json()["content"][0]
    assert (block["type"], block["thinking"]) == ("thinking", "")
    assert block["signature"]
    events = events_of(post(front, thinking=thinking, stream=True))
    check_order(events)
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert "thinking_delta" not in deltas
    assert deltas[0] == "signature_delta"


def test_an_error_in_mid_stream_is_the_last_event(front: FrontEnd) -> None:
    front.engine.reply = "error"  # type: ignore[attr-defined]
    answer = post(front, stream=True)
    *before, last = events_of(answer)
    assert before[0]["type"] == "message_start"
    assert checked(ErrorResponse, last).request_id == answer.headers["request-id"]
    client = anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0)
    arguments = {name: value for name, value in BODY.items() if name != "context_management"}
    with pytest.raises(anthropic.APIStatusError) as failed, client.messages.stream(**arguments) as stream:
        stream.get_final_message()
    assert failed.value.request_id == failed.value.body["request_id"]  # type: ignore[index]


def test_counts_have_the_declared_types(front: FrontEnd) -> None:
    arguments = {name: value for name, value in BODY.items() if name != "max_tokens"}
    for kind, change in ((beta.BetaMessageTokensCount, {}), (types.MessageTokensCount, {"context_management": None})):
        answer = HTTP.post(f"{front.url}{PATH}/count_tokens", json=arguments | change)
        assert checked(kind, answer.json()).input_tokens > 0
        assert answer.headers["request-id"]


# ---- errors -----------------------------------------------------------------------------------------------------


def check_error(answer: httpx.Response, status: int, type_: str) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["error"]["type"] == type_
    if type_ == "request_too_large":  # documented, but missing in the package
        body["error"]["type"] = "api_error"
    found = checked(ErrorResponse, body)
    assert found.request_id == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_errors_of_every_layer_carry_the_request_id() -> None:
    keys = KeyTable(KeySources(["secret"]).read())
    version = {"anthropic-version": "2023-06-01"}
    with front_end(reply, keys=keys, limits=Limits(max_body_bytes=2000)) as front:
        key = {"x-api-key": "secret"}
        check_error(post(front), 401, "authentication_error")
        check_error(HTTP.get(f"{front.url}/v1/models", headers=version), 401, "authentication_error")
        given = [
            ({"json": BODY | {"model": "other"}}, 404, "not_found_error"),
            ({"content": b"[" * 3000}, 413, "request_too_large"),
            ({"content": b"{"}, 400, "invalid_request_error"),
            ({"json": BODY, "headers": {f"x-{index}": "y" for index in range(200)}}, 431, "invalid_request_error"),
            ({"json": BODY, "headers": {"expect": "a wonder"}}, 417, "invalid_request_error"),
        ]
        for request, status, type_ in given:
            headers = key | {"content-type": "application/json"} | request.pop("headers", {})
            check_error(HTTP.post(front.url + PATH, headers=headers, **request), status, type_)
        check_error(HTTP.get(front.url + PATH, headers=key), 405, "invalid_request_error")
        check_error(HTTP.post(f"{front.url}{PATH}/batches", headers=key, json={}), 400, "invalid_request_error")
        check_error(HTTP.get(f"{front.url}/v1/nothing", headers=key | version), 404, "not_found_error")
        given_id = HTTP.get(f"{front.url}/v1/nothing", headers=key | version | {"x-request-id": "mine"})
        assert given_id.json()["request_id"] == "mine"
        # Without a request there is no path and no header: the error has the form of both APIs.
        with front.connect() as connection:
            connection.sendall(b"no request\r\n\r\n")
            head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
        assert b"request-id: " + json.loads(body)["request_id"].encode() in head
        assert json.loads(body)["error"]["code"] == "bad_http"
        pydantic.TypeAdapter(ErrorResponse).validate_python(json.loads(body), strict=True)


@pytest.mark.parametrize(
    ("status", "type_"),
    [(429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"), (529, "overloaded_error")],
)
def test_errors_of_a_busy_server_carry_the_request_id(status: int, type_: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await APIError(status, "too much").response()(scope, receive, send)

    transport = httpx.ASGITransport(RequestBoundary(app))  # type: ignore[arg-type]

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(PATH)

    check_error(asyncio.run(answer()), status, type_)
