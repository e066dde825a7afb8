"""Structured output through the server with the real client, and its errors."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, ConfigDict

from tests.server.running_server import NAME, RunningServer, wait_for

MESSAGES: list[Any] = [{"role": "user", "content": "when does the lift stop?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SLOW = "(a|b*)" * 20_000  # takes too long to compile


class Colour(StrEnum):
    RED = "red"
    DARK_GREEN = "dark green"


class Seat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: Literal[1, 2, 3]
    heated: bool
    colour: Colour | None


class Lift(BaseModel):
    model_config = ConfigDict(extra="forbid")

    seat: Seat | Colour
    spare: Colour | None


def body(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 200, "temperature": 1.5} | more


# ---- output ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_parse_returns_pydantic_models(server: RunningServer, temperature: float) -> None:
    answer = server.client().chat.completions.parse(
        model=NAME, messages=MESSAGES, response_format=Lift, temperature=temperature, seed=3, max_tokens=200
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Lift)
    assert Lift.model_validate_json(choice.message.content or "") == choice.message.parsed


def test_parse_while_streaming(server: RunningServer) -> None:
    with server.client().chat.completions.stream(
        model=NAME, messages=MESSAGES, response_format=Lift, seed=4, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Lift)


def test_parse_through_responses(server: RunningServer) -> None:
    answer = server.client().responses.parse(
        model=NAME, input="when does the lift stop?", text_format=Lift, max_output_tokens=200, temperature=1.0
    )
    assert isinstance(answer.output_parsed, Lift)


def test_json_object_mode_returns_an_object(server: RunningServer) -> None:
    answer = server.client().chat.completions.create(
        model=NAME, messages=MESSAGES, response_format={"type": "json_object"}, n=8, seed=1, max_tokens=100
    )
    whole = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


WAYS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[0-9]{2}-[ab]+"}, "[0-9]{2}-[ab]+"),
    ({"guided_choice": ["red", "dark green"]}, "red|dark green"),
    ({"guided_grammar": 'start: "a" item+\nitem: "x" | "yy"'}, "a(x|yy)+"),
    ({"guided_grammar": 'root ::= "a" item+\nitem ::= "x" | "yy"'}, "a(x|yy)+"),
    ({"guided_json": {"enum": [1, "two"]}}, '1|"two"'),
    ({"guided_json": '{"enum": [1, "two"]}'}, '1|"two"'),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
    ({"structured_outputs": {"choice": ["é👍", "no"]}}, "é👍|no"),
    ({"structured_outputs": {"grammar": 'start: "yes"'}}, "yes"),
    ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "null"}}}}, "null"),
]


@pytest.mark.parametrize(("way", "pattern"), WAYS, ids=lambda value: str(value)[:50])
def test_every_structure_parameter_is_enforced(server: RunningServer, way: dict[str, Any], pattern: str) -> None:
    texts = []
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "lift"})):
        reply = server.post(path, body(**prompt, **way, n=2, seed=3, max_tokens=60)).json()
        for choice in reply["choices"]:
            texts.append(choice.get("text") or choice["message"]["content"])
            assert choice["finish_reason"] == "stop", reply
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_a_stream_has_the_same_structured_output(server: RunningServer) -> None:
    client = server.client()
    request_body: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "n": 3, "seed": 8, "max_tokens": 200}
    request_body["extra_body"] = {"guided_json": Lift.model_json_schema()}
    whole = client.chat.completions.create(**request_body)
    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in client.chat.completions.create(**request_body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["stop"] * 3
    assert [Lift.model_validate_json(text) for text in texts]


def test_max_tokens_truncates_structured_output(server: RunningServer) -> None:
    reply = server.post(CHAT, body(messages=MESSAGES, guided_regex="[a-z]{50}", max_tokens=3)).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 3


def test_text_and_null_formats_do_not_constrain(server: RunningServer) -> None:
    nothing = {"guided_json": None, "structured_outputs": None}
    plain = server.post(CHAT, body(messages=MESSAGES, seed=1, max_tokens=8)).json()
    for format_ in ({"type": "text"}, None):
        reply = server.post(
            CHAT, body(messages=MESSAGES, seed=1, max_tokens=8, response_format=format_, **nothing)
        ).json()
        assert reply["choices"] == plain["choices"]


def test_structured_and_plain_requests_run_together(server: RunningServer) -> None:
    def complete(index: int) -> tuple[int, str]:
        way = {"guided_choice": [f"canary {index}", f"bird {index}"]} if index % 2 else {}
        reply = server.post(TEXT, body(prompt=f"lift {index}", seed=index, max_tokens=30, **way))
        return index, reply.json()["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        for index, text in pool.map(complete, range(24)):
            assert text in (f"canary {index}", f"bird {index}") or not index % 2


# ---- errors -----------------------------------------------------------------------------------------------


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema} | more}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json_object"}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_object", "typ": 1}}, "response_format.typ", "unknown_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": {}}}},
        "response_format.json_schema.name",
        "invalid_value",
    ),
    (schema_format({"type": "object"}, name="not a name"), "response_format.json_schema.name", "invalid_value"),
    (schema_format({"type": "object"}, strict="yes"), "response_format.json_schema.strict", "invalid_type"),
    (schema_format({"type": "objet"}), "response_format.json_schema.schema", "invalid_value"),
    (schema_format({"type": "object", "properties": {"a": 5}}), "response_format.json_schema.schema", "invalid_value"),
    (schema_format({"not": {}}), "response_format.json_schema.schema", "invalid_value"),
    (schema_format({"$ref": "#/$defs/missing"}), "response_format.json_schema.schema", "invalid_value"),
    (schema_format({"$ref": "https://example.com/x.json"}), "response_format.json_schema.schema", "invalid_value"),
    (schema_format({"type": "string", "pattern": "["}), "response_format.json_schema.schema", "invalid_value"),
    (schema_format({"type": "string", "description": "\ud800"}), "response_format.json_schema.schema", "invalid_value"),
    (schema_format(False), "response_format.json_schema.schema", "invalid_value"),
    (schema_format(deep(40)), "response_format.json_schema.schema", "invalid_value"),
    (schema_format(deep(400)), "response_format.json_schema.schema", "invalid_value"),
    (schema_format({"enum": ["x" * 200_000]}), "response_format.json_schema.schema", "invalid_value"),
    (
        schema_format({"type": "integer", "minimum": 5, "maximum": 4}),
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"guided_json": "{"}, "guided_json", "invalid_value"),
    ({"guided_json": 5}, "guided_json", "invalid_type"),
    ({"guided_json": "5"}, "guided_json", "invalid_value"),
    ({"guided_regex": "("}, "guided_regex", "invalid_value"),
    ({"guided_regex": ""}, "guided_regex", "invalid_value"),
    ({"guided_regex": 5}, "guided_regex", "invalid_type"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "invalid_value"),
    ({"guided_regex": "\ud800"}, "guided_regex", "invalid_value"),
    ({"guided_regex": "x" * 200_000}, "guided_regex", "invalid_value"),
    ({"guided_regex": SLOW}, "guided_regex", "invalid_value"),
    ({"guided_choice": []}, "guided_choice", "invalid_value"),
    ({"guided_choice": [""]}, "guided_choice", "invalid_value"),
    ({"guided_choice": "red"}, "guided_choice", "invalid_type"),
    ({"guided_choice": ["red", 5]}, "guided_choice[1]", "invalid_type"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "invalid_value"),
    ({"guided_grammar": "no grammar"}, "guided_grammar", "invalid_value"),
    (
        {"guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i}" for i in range(6000))},
        "guided_grammar",
        "invalid_value",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": "json"}, "structured_outputs", "invalid_type"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "invalid_value"),
    (schema_format({}) | {"guided_json": {}}, "guided_json", "invalid_value"),
]


@pytest.mark.parametrize(("change", "param", "code"), BAD, ids=lambda value: ascii(value)[:70])
def test_invalid_structures_name_their_parameter(
    server: RunningServer, change: dict[str, Any], param: str, code: str
) -> None:
    """Also for a stream: its status is sent only after the grammar has compiled."""
    for stream in (False, True):
        for path, prompt in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "lift"}))[
            : 1 if len(str(change)) > 99 else 2
        ]:
            response = server.post(path, body(**prompt, **change, stream=stream))
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code), error
            assert len(error["message"]) < 600
            for leak in ("Traceback", "site-packages", ".py", "Error(", "no_forcing", "x-guidance"):
                assert leak not in error["message"] or leak in str(change)
    assert server.get("/health").status_code == 200


# All forty rules are recursive: after some fifty characters the parser has too many states.
OUTGROWING = f"start: {' | '.join(f'r{i}' for i in range(40))}\n" + "\n".join(
    f'r{i}: "!" r{i} | "!"' for i in range(40)
)


def test_a_grammar_that_becomes_too_complex_while_generating_names_its_parameter(server: RunningServer) -> None:
    request_body = body(prompt="lift", guided_grammar=OUTGROWING, ignore_eos=True, max_tokens=120)
    whole = server.post(TEXT, request_body)
    assert whole.status_code == 400
    streamed = server.post(TEXT, {**request_body, "stream": True})
    assert streamed.status_code == 200
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    last = json.loads(events[-2])
    assert len(events) > 10
    assert events[-1] == "[DONE]"
    for error in (whole.json()["error"], last["error"]):
        assert (error["type"], error["param"]) == ("invalid_request_error", "guided_grammar")
        assert "too complex" in error["message"]
    assert server.post(TEXT, body(prompt="lift", max_tokens=3)).status_code == 200
    server.wait_idle()


def test_responses_uses_its_own_parameter_names(server: RunningServer) -> None:
    format_ = {"type": "json_schema", "name": "a", "schema": {"type": "objet"}}
    response = server.post("/v1/responses", {"model": NAME, "input": "lift", "text": {"format": format_}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "text.format.schema"


def test_a_client_that_disconnects_while_its_grammar_compiles(server: RunningServer) -> None:
    other = "(a|c*)" * 20_000  # not cached as too slow
    with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + TEXT, json=body(prompt="lift", guided_regex=other), timeout=0.5)
    late = server.post(TEXT, body(prompt="lift", guided_regex="(a|d*)" * 20_000, timeout=0.2))
    assert late.status_code == 408
    assert server.post(TEXT, body(prompt="lift", max_tokens=3)).status_code == 200
    wait_for(lambda: server.metric("chairlift_requests_open") == 0, "the requests to end")
    server.wait_idle()
