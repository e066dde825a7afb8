"""What the router reads of request bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chairlift.cluster.routing.router import RoutedRequest
from chairlift.cluster.serving.routed_body import generates, is_whole, read_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def routed(path: str, fields: dict[str, Any], salt: str = "") -> RoutedRequest:
    return read_body(path, json.dumps(fields).encode(), with_keys=True, salt=salt)


def shared(first: RoutedRequest, second: RoutedRequest) -> int:
    """The longest prefix with a common key."""
    digests = {key.digest for key in second.keys}
    return max((key.num_tokens for key in first.keys if key.digest in digests), default=0)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_chats_that_continue_each_other_share_their_beginning() -> None:
    system, question = message("system", "be brief " * 100), message("user", "why? " * 100)
    first = routed(CHAT, {"messages": [system, question]})
    longer = routed(CHAT, {"messages": [system, question, message("assistant", "so"), message("user", "and? " * 99)]})
    other = routed(CHAT, {"messages": [system, message("user", "how? " * 100)]})
    assert shared(first, longer) > 0.75 * first.num_prompt
    assert 0.6 * 225 < shared(first, other) < 240  # the system message has 225 pieces of four bytes
    assert shared(first, routed(CHAT, {"messages": [question, system]})) == 0


def test_what_is_cached_apart_has_other_keys() -> None:
    fields = {"prompt": "the lift " * 100}
    plain = routed(TEXT, fields)
    assert shared(plain, routed(TEXT, fields)) > 0
    for different in (
        routed(TEXT, fields | {"model": "adapter"}),
        routed(TEXT, fields | {"cache_salt": "mine"}),
        routed(TEXT, fields, salt="key"),
    ):
        assert shared(plain, different) == 0
        assert different.num_prompt == plain.num_prompt


@pytest.mark.parametrize(
    ("path", "head"),
    [
        ("/v1/messages", "system"),
        ("/v1/responses", "instructions"),
        ("/v1/responses/compact", "instructions"),
        (CHAT, "tools"),
        ("/v1/messages", "tools"),
    ],
)
def test_fields_before_the_messages_come_first(path: str, head: str) -> None:
    bodies = [{head: "x" * 2000, "messages": [message("user", text)], "input": text} for text in ("one", "two")]
    first, second = (routed(path, body) for body in bodies)
    assert shared(first, second) > 350


def test_prompts_of_token_ids_and_several_prompts() -> None:
    ids = list(range(200))
    assert routed(TEXT, {"prompt": ids}).num_prompt == 200
    assert shared(routed(TEXT, {"prompt": ids}), routed(TEXT, {"prompt": [*ids[:150], 7]})) == 128
    several = routed(TEXT, {"prompt": [ids, ids], "n": 3, "max_tokens": 10})
    assert (several.num_prompt, several.max_output) == (400, 60)


def test_the_bodies_of_ollama_and_llama_cpp() -> None:
    long = "a long system prompt " * 50
    system = {"role": "system", "content": long}
    chats = [routed("/api/chat", {"messages": [system, {"role": "user", "content": one}]}) for one in ("a", "b")]
    assert shared(*chats) > 200
    prompts = [routed("/api/generate", {"system": long, "prompt": one}) for one in ("a", "b")]
    assert shared(*prompts) > 200
    extra = [{"filename": "a.py", "text": long}]
    assert routed("/completion", {"prompt": "a", "n_predict": 10, "n_cmpl": 3}).max_output == 30
    infills = [routed("/infill", {"input_prefix": one, "input_extra": extra}) for one in ("a", "b")]
    assert shared(*infills) > 200
    assert routed("/completion", {"prompt": list(range(200))}).num_prompt == 200
    assert routed("/completion", {"prompt": "a", "n_predict": 7}).max_output == 7
    assert routed("/completion", {"prompt": "a", "n_predict": -1}).max_output is None
    assert routed("/api/chat", {"messages": [], "options": {"num_predict": 7}}).max_output == 7
    paths = ["/api/chat", "/api/generate", "/completion", "/infill", "/v1/completions", "/v1/responses/compact"]
    assert [path for path in (*paths, "/api/show", "/embedding", "/api/embed") if generates(path)] == paths


def test_whole_streams_are_known_by_the_ends_of_their_last_events() -> None:
    call = b'{"message":{"tool_calls":[{"function":{"arguments":{"done":true}}}]},"done":false}\n'
    ending = b'1,2,3],"done":true,"total_duration":1,"context":[1,2]}\n'
    long_ending = b"," + b"7," * 2000 + b"7]}\n"
    for path in ("/api/chat", "/api/generate"):
        assert [is_whole(path, one) for one in (b"", call, ending, long_ending)] == [False, False, True, True]
    token, last = b'data: {"content":"a","stop":false}\n\n', b'data: {"stop":true,"timings":{}}\n\n'
    assert [is_whole("/infill", one) for one in (b"", token, last, long_ending)] == [False, False, True, True]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_limits_of_the_output(name: str) -> None:
    assert routed(TEXT, {"prompt": "hi", name: 5}).max_output == 5
    assert routed(TEXT, {"prompt": "hi", name: "5"}).max_output is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'{"prompt": 5}',
        b'{"prompt": [[-1], [true]]}',
        b"\xff",
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": %b}' % (b"9" * 5000),
    ],
)
def test_bodies_that_a_replica_will_refuse_are_routed_too(body: bytes) -> None:
    assert read_body(TEXT, body, with_keys=True) == RoutedRequest(0)


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/messages", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("name", ["n", "max_tokens", "cache_salt", "model", "messages", "tools", "input", "prompt"])
def test_no_value_of_a_field_stops_the_reading(path: str, name: str) -> None:
    deep = b"[" * 900 + b"]" * 900
    for value in (b"9" * 30, b"9" * 4000, b"9" * 5000, b"-1", b"1e999", deep, b'{"a":' * 900 + b"1" + b"}" * 900):
        body = b'{"prompt": "hi", "%b": %b}' % (name.encode(), value)
        found = read_body(path, body, with_keys=True)
        assert found.num_prompt >= 0
        assert (found.max_output or 0) < 2**70
