"""Fields that the server does not know are ignored and named in a header, or refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift.server.batch.folder import FilesFolder
from chairlift.server.openai.types import ChatRequest
from chairlift.server.wire.unknown_fields import HEADER, MAX_HEADER, MAX_IGNORED, UnknownFields, resembling
from chairlift.text.chat_template import ChatTemplate
from tests.server.expected_errors import check_shape
from tests.server.front_end import NAME, FrontEnd, front_end
from tests.server.running_server import HTTP
from tests.server.test_file_attacks import ended

HELLO = {"role": "user", "content": "hello"}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HELLO]},
    TEXT: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": [HELLO], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [HELLO]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [70]},
    "/api/chat": {"messages": [HELLO]},
    "/api/generate": {"prompt": "hello"},
    "/api/show": {},
    "/completion": {"prompt": "hello"},
    "/apply-template": {"messages": [HELLO]},
}


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end() as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[FrontEnd]:
    with front_end(unknown_fields="refuse") as server:
        yield server


def post(server: FrontEnd, path: str, **fields: Any) -> httpx.Response:
    data = json.dumps({"model": NAME, **BODIES[path], **fields})  # with escapes, so that any text can be sent
    return HTTP.post(server.url + path, content=data, headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_and_named(served: FrontEnd, path: str) -> None:
    response = post(served, path, colour="red", size=None)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "colour"
    assert HEADER not in post(served, path).headers


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_refused_if_the_server_is_told_to(strict: FrontEnd, path: str) -> None:
    response = post(strict, path, colour="red")
    assert response.status_code == 400
    assert "colour: unknown parameter" in check_shape(path, response)
    assert post(strict, path).status_code == 200


MISSPELLED = [
    (CHAT, {"temprature": 0.5}, "temprature", "temperature"),
    (CHAT, {"topP": 0.5}, "topP", "top_p"),
    (CHAT, {"max-tokens": 3}, "max-tokens", "max_tokens"),
    (CHAT, {"messages": [HELLO | {"tool_call": []}]}, "messages[0].tool_call", "tool_calls"),
    (CHAT, {"stream": True, "stream_options": {"include_usages": 1}}, "stream_options.include_usages", "include_usage"),
    (TEXT, {"max_token": 3}, "max_token", "max_tokens"),
    (RESPONSES, {"instruction": "x"}, "instruction", "instructions"),
    (MESSAGES, {"stop_sequence": ["x"]}, "stop_sequence", "stop_sequences"),
    (MESSAGES, {"messages": [HELLO | {"contents": 1}]}, "messages[0].contents", "content"),
]


@pytest.mark.parametrize(("path", "fields", "location", "meant"), MISSPELLED)
def test_a_misspelled_field_is_refused_with_its_name(
    served: FrontEnd, path: str, fields: dict[str, Any], location: str, meant: str
) -> None:
    response = post(served, path, **fields)
    assert response.status_code == 400
    assert f"{location}: unknown parameter; did you mean '{meant}'?" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"max_output_tokens": 3}, "max_output_tokens"),
        (CHAT, {"instructions": "be brief"}, "instructions"),
        (TEXT, {"tools": []}, "tools"),
        (RESPONSES, {"n": 2}, "n"),
        (MESSAGES, {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_field_of_another_endpoint_that_decides_the_answer_is_refused(
    served: FrontEnd, path: str, fields: dict[str, Any], name: str
) -> None:
    response = post(served, path, **fields)
    assert response.status_code == 400
    assert f"{name}: unknown parameter" in response.json()["error"]["message"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SIZED = {"type": "function", "function": {"name": "g", "size": 1}}
FLAT = {"type": "function", "name": "f", "parameters": {}, "size": 1}
CLIENT_TOOL = {"name": "f", "input_schema": {"type": "object"}, "size": 1}
NESTED = [
    (CHAT, {"messages": [HELLO | {"colour": "red"}]}, "messages[0].colour"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "size": 1}]}]}, "content[0].size"),
    (CHAT, {"tools": [TOOL | {"colour": 1}], "tool_choice": "none"}, "tools[0].colour"),
    (CHAT, {"tools": [TOOL, SIZED], "tool_choice": "none"}, "tools[1].function.size"),
    (CHAT, {"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
    (CHAT, {"response_format": {"type": "json_object", "colour": 1}}, "response_format.colour"),
    (RESPONSES, {"input": [HELLO | {"colour": "red"}]}, "input[0].colour"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": "none"}, "tools[0].size"),
    (RESPONSES, {"reasoning": {"colour": 1}}, "reasoning.colour"),
    (MESSAGES, {"messages": [HELLO | {"colour": "red"}]}, "messages[0].colour"),
    (MESSAGES, {"tools": [CLIENT_TOOL], "tool_choice": {"type": "none"}}, "tools[0].size"),
    (MESSAGES, {"system": [{"type": "text", "text": "x", "size": 1}]}, "system[0].size"),
    ("/tokenize", {"prompt": None, "messages": [HELLO | {"colour": 1}]}, "messages[0].colour"),
]


@pytest.mark.parametrize(("path", "fields", "location"), NESTED)
def test_nested_fields_are_named_with_their_path(
    served: FrontEnd, path: str, fields: dict[str, Any], location: str
) -> None:
    response = post(served, path, **fields)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER].endswith(location)


def test_variables_that_the_template_does_not_read_are_unknown(served: FrontEnd, strict: FrontEnd) -> None:
    given = {"self": 1, "tokenizer": 1, "preserve_thinking": True, "\ud800": 1, "style": None}
    for path in (CHAT, RESPONSES, MESSAGES):
        answer = post(served, path, chat_template_kwargs=given)
        assert answer.status_code == 200, answer.text
        named = [f"chat_template_kwargs.{name}" for name in ("self", "tokenizer", "preserve_thinking", "%3F")]
        assert answer.headers[HEADER] == ", ".join(named)
        assert post(strict, path, chat_template_kwargs={"self": 1}).status_code == 400


def test_a_count_takes_the_whole_request_that_is_counted(served: FrontEnd) -> None:
    whole = {
        "max_tokens": 5,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "stream": True,
    }
    answers = [post(served, "/v1/messages/count_tokens", **fields) for fields in ({}, whole)]
    assert answers[0].json() == answers[1].json()
    assert HEADER not in answers[1].headers


def test_fields_of_messages_that_the_template_reads_are_known() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.mood }}{{ m['place'] }}{% endfor %}"
    assert {"mood", "place", "content"} <= ChatTemplate(template).names


def test_a_large_body_is_read_by_the_same_rule(served: FrontEnd) -> None:
    response = post(served, "/tokenize", prompt="x " * 20_000, colour=1)
    assert (response.status_code, response.headers[HEADER]) == (200, "colour")
    assert post(served, "/tokenize", prompt="x " * 20_000, add_special_token=False).status_code == 400


def test_the_header_is_bounded_and_cannot_hold_another_header(served: FrontEnd) -> None:
    evil = "x\r\nset-cookie: a=b, ü"
    response = post(served, CHAT, **{evil: 1})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "x%0D%0Aset-cookie%3A%20a%3Db%2C%20%C3%BC"
    assert "set-cookie" not in response.headers
    surrogate = post(served, CHAT, messages=[HELLO | {"\ud800x": 1}])
    assert surrogate.headers[HEADER] == "messages[0].%3Fx"
    many = post(served, CHAT, **{f"colour_{i}": 1 for i in range(200)}).headers[HEADER]
    assert many.endswith(", ...")
    assert len(many) <= MAX_HEADER
    long = post(served, CHAT, **{"é" * 3000: 1}).headers[HEADER]
    assert len(long) <= MAX_HEADER


def test_a_field_without_a_name_does_not_break_the_response(served: FrontEnd) -> None:
    assert post(served, CHAT, **{"": 1}).headers[HEADER] == '""'
    assert post(served, CHAT, **{"colour": 1, "": 1}).headers[HEADER] == 'colour, ""'


def test_the_work_of_many_unknown_fields_is_bounded(served: FrontEnd) -> None:
    message = HELLO | {f"colour_{i}": 1 for i in range(MAX_IGNORED + 1)}
    response = post(served, CHAT, messages=[message])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unknown_parameter"
    # The same field of many messages counts once.
    response = post(served, CHAT, messages=[HELLO | {"colour": 1}] * 600)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.headers[HEADER] == "messages[0].colour"


def test_a_name_is_compared_only_as_long_as_it_may_be_a_misspelling() -> None:
    rows = []

    class Counted(str):
        def __iter__(self) -> Iterator[str]:
            rows.append(1)
            return super().__iter__()

    assert resembling("f" * 40, [Counted("s" * 40)]) is None
    assert len(rows) <= 4


def test_ignored_fields_are_logged_once_per_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chairlift.server")
    with front_end(api_keys=["alice a-secret", "bob b-secret"]) as server:
        for key in ("a-secret", "b-secret", "a-secret"):
            body = {"model": NAME, "messages": [HELLO], "colour": 1}
            HTTP.post(server.url + CHAT, json=body, headers={"authorization": f"Bearer {key}"})
    lines = [record.getMessage() for record in caplog.records if HEADER in record.getMessage()]
    assert [line.split()[2] for line in lines] == ["alice", "bob"]


def test_ignored_fields_of_a_batch_are_logged_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chairlift.server")
    body = {"model": NAME, "prompt": "hello", "colour": 1}
    request = {"custom_id": "a", "method": "POST", "url": TEXT, "body": body}
    with front_end(files=FilesFolder(tmp_path, 2**20)) as server:
        assert ended(server, json.dumps(request).encode())["status"] == "completed"
    assert f"the client of a batch sends fields that are ignored, which {HEADER} names: colour" in caplog.text


def test_what_resembles_a_parameter() -> None:
    known = ChatRequest.known_fields()
    assert resembling("Temperature", known) == "temperature"
    assert resembling("mesages", known) == "messages"
    for other in ("colour", "client_metadata", "chat_template", "N", "x" * 100_000):
        assert resembling(other, known) is None


def test_parameters_of_other_servers_are_no_misspellings(served: FrontEnd) -> None:
    answer = post(served, CHAT, models=["a", "b"])
    assert (answer.status_code, answer.headers[HEADER]) == (200, "models")
    fields = UnknownFields("ignore")  # A plugin of another test may have made top_a known to the server.
    fields.add("top_a", "top_a", ["top_p", "top_k"])
    assert fields.header() == "top_a"
