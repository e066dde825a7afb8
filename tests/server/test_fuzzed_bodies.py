"""Bodies made from valid ones by random changes: each gets a response or an error in the form of its API."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from tests.server.expected_errors import check_shape
from tests.server.running_server import HTTP, NAME, RunningServer

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALLED = [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["hello", "you"], "max_tokens": 2, "logprobs": 1, "stop": ["x"], "echo": True}),
    ("/v1/completions", {"prompt": [[1, 2]], "max_tokens": 2, "n": 2, "stream": True, "stream_options": {}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logit_bias": {"5": 1.0}, "guided_choice": ["a", "b"]}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "temperature": 0.5, "seed": 1, "top_logprobs": None}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9, "response_format": SCHEMA}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "tools": [TOOL], "tool_choice": "auto"}),
    ("/v1/responses", {"input": HELLO, "max_output_tokens": 2, "text": {"format": {"type": "text"}}, "metadata": {}}),
    ("/v1/embeddings", {"input": ["hello"], "encoding_format": "float"}),
    ("/v1/score", {"text_1": "hello", "text_2": ["you"]}),
    ("/v1/rerank", {"query": "hello", "documents": ["a", {"text": "b"}], "top_n": 1}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/api/chat", {"messages": HELLO, "options": {"num_predict": 2, "stop": ["x"]}, "format": "json", "tools": [TOOL]}),
    ("/api/chat", {"messages": CALLED, "options": {"num_predict": 2}, "stream": False, "logprobs": True}),
    ("/api/generate", {"prompt": "a", "context": [1, 2], "options": {"num_predict": 2, "num_ctx": 9}, "system": "b"}),
    ("/api/embed", {"input": ["a", "b"], "dimensions": 2, "options": {}}),
    ("/completion", {"prompt": [[1, "a"], "b"], "n_predict": 2, "n_probs": 1, "logit_bias": [[5, False], ["a", 1.0]]}),
    ("/completion", {"prompt": "a", "n_predict": 2, "stream": True, "samplers": ["top_k"], "response_fields": ["a/b"]}),
    ("/apply-template", {"messages": HELLO}),
    ("/embedding", {"content": ["a"], "embd_normalize": -1}),
]
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**40,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "\x00",
    "x" * 3000,
    [],
    [[]],
    [None],
    {},
    {"": ""},
    {"type": None},
    {"$ref": "#"},
    [[[[[[]]]]]],
    {"a": {"a": {"a": 1}}},
    "١٢",
    "1e5",
    ["a"] * 300,
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) pairs of a body."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in items] + [place for _, child in items for place in places(child)]


def changed(body: dict[str, Any], chance: random.Random) -> bytes:
    """A copy of a body with one to three changes of its values or names, or with damage to its text."""
    body = json.loads(json.dumps(body))
    for _ in range(chance.randint(1, 3)):
        found = places(body)
        if not found:
            break
        container, key = chance.choice(found)
        match chance.randrange(5):
            case 0 | 1:
                container[key] = copy.deepcopy(chance.choice(JUNK))
            case 2:
                del container[key]
            case 3 if isinstance(container, dict):
                container[chance.choice(["", "type", "content", "role", "x" * 500, "\ud800"])] = copy.deepcopy(
                    chance.choice(JUNK)
                )
            case _:
                container[key] = [container[key], copy.deepcopy(container[key])]
    text = json.dumps(body).encode()
    if chance.random() < 0.15:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice([b"", b"\xff", b"{", b'"', b"\\u", b"\x00" * 50]) + text[at + 1 :]
    return text


@pytest.mark.parametrize("part", range(5))
def test_no_changed_body_makes_the_server_fail(described_server: RunningServer, part: int) -> None:
    statuses = set()
    for number in range(100 * part, 100 * (part + 1)):
        path, body = VALID[number % len(VALID)]
        chance = random.Random(number)
        sent = changed({"model": NAME, **body}, chance)
        answer = HTTP.post(described_server.url + path, content=sent, headers={"Content-Type": "application/json"})
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (path, sent[:500], answer.text)
        assert "server_error" not in answer.text, (path, sent[:500], answer.text)
        if answer.status_code != 200:
            message = check_shape(path, answer)
            assert message
            assert "Traceback" not in message
    assert statuses == {200, 400, 404} or statuses == {200, 400}
    assert described_server.get("/health").status_code == 200
    described_server.wait_idle()


def test_the_unchanged_bodies_are_valid(described_server: RunningServer) -> None:
    for path, body in VALID:
        answer = described_server.post(path, {"model": NAME, **body})
        assert answer.status_code == 200, (path, answer.text)
