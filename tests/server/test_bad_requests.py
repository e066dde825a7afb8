"""Invalid requests get clear errors, and the server stays healthy."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.server.expected_errors import expect, nested
from tests.server.running_server import HTTP, NAME, RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def called(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


BAD_SAMPLING: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"n": True}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "a" * 5000}, "stop"),
    ({"stop": ["a" * 100] * 50}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": 100_000, "max_tokens": 200_000}, "min_tokens"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": -1}, "timeout"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"colour": 1}}, "stream_options"),
    ({"cache_salt": "x" * 300}, "cache_salt"),
    ({"colour": "red"}, "colour"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 10**30}, "min_tokens"),
    ({"top_k": 10**30}, "top_k"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"stop": "\ud800"}, "stop"),
    ({"stop": ["\ud800"]}, "stop"),
    ({f"colour{i}": "red" for i in range(300)}, None),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [3]}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "self"),
    ({"chat_template_kwargs": {"max_tokens": 1}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
    ({"chat_template_kwargs": {"\ud800": 1}}, "?"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "hello", "deep": nested(600)}]}, f"messages[0].deep{'[0]' * 32}"),
    ({"messages": [{"role": "user", "content": "hello", "wide": [[]] * 100_000}]}, "messages[0]"),
    ({"messages": [called("[" * 5000)]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [called("3")]}, "messages[0].tool_calls[0].function.arguments"),
]

BAD_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1, 10**6]}, "prompt"),
    ({"prompt": [1, 10**30]}, "prompt"),
    ({"prompt": ["good", ""]}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": [5] * 256}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "stream"),
    ({"beam_width": 2, "stream": True}, "stream"),
    ({"beam_width": 1}, "beam_width"),
    ({"beam_width": 65}, "beam_width"),
    ({"use_beam_search": True}, "beam_width"),
    ({"use_beam_search": False, "beam_width": 2}, "use_beam_search"),
    ({"beam_width": 2, "best_of": 3}, "best_of"),
    ({"beam_width": 2, "n": 3}, "n"),
    ({"beam_width": 2, "temperature": 0.5}, "temperature"),
    ({"beam_width": 2, "top_k": 5}, "top_k"),
    ({"beam_width": 2, "presence_penalty": 0.5}, "presence_penalty"),
    ({"beam_width": 2, "guided_regex": "a+"}, "guided_regex"),
    ({"beam_width": 2, "stop": "a"}, "stop"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"echo": True, "suffix": "x"}, "echo"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "stream"),
    ({"prompt_logprobs": 1, "beam_width": 2}, "prompt_logprobs"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "beam_width": 2}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt": ["a"] * 200, "n": 2}, "n"),
    ({"prompt": "x" * 10**6}, "prompt"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("change", "param"), BAD_SAMPLING, ids=lambda value: ascii(value)[:60])
def test_invalid_sampling_parameters_are_refused(
    server: RunningServer, path: str, change: dict[str, Any], param: str | None
) -> None:
    body = {"model": NAME, "max_tokens": 4} | ({"messages": HELLO} if path == CHAT else {"prompt": "hello"})
    expect(server, server.post(path, body | change), 400, param)


@pytest.mark.parametrize(("change", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_invalid_chat_parameters_are_refused(server: RunningServer, change: dict[str, Any], param: str) -> None:
    expect(server, server.post(CHAT, {"model": NAME, "messages": HELLO, **change}), 400, param)


@pytest.mark.parametrize(("change", "param"), BAD_PROMPTS, ids=lambda value: str(value)[:40])
def test_invalid_prompts_are_refused(server: RunningServer, change: dict[str, Any], param: str) -> None:
    expect(server, server.post(TEXT, {"model": NAME, "prompt": "hello", **change}), 400, param)


JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"model": NAME, "prompt": "hello"}).encode()
BIG = b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}'

# Errors that are found before the parameters are validated: method, path, headers, body, status.
BAD_MESSAGES: dict[str, tuple[str, str, dict[str, str], bytes, int]] = {
    "no body": ("POST", TEXT, JSON, b"", 400),
    "half an object": ("POST", TEXT, JSON, b"{", 400),
    "a list": ("POST", TEXT, JSON, b"[]", 400),
    "null": ("POST", CHAT, JSON, b"null", 400),
    "a string": ("POST", CHAT, JSON, b'"text"', 400),
    "a number": ("POST", CHAT, JSON, b"3", 400),
    "not UTF-8": ("POST", TEXT, JSON, b"\xff\xfe", 400),
    "two bodies": ("POST", TEXT, JSON, GOOD + GOOD, 400),
    "too deep": ("POST", TEXT, JSON, b"[" * 100_000, 400),
    "too deep, and closed": ("POST", CHAT, JSON, b'{"messages":' + b"[" * 9999 + b"]" * 9999 + b"}", 400),
    "packed": ("POST", TEXT, JSON | {"Content-Encoding": "gzip"}, gzip.compress(GOOD), 400),
    "a form": ("POST", TEXT, {"Content-Type": "application/x-www-form-urlencoded"}, b"model=tiny", 415),
    "plain text": ("POST", CHAT, {"Content-Type": "text/plain"}, GOOD, 415),
    "no type": ("POST", TEXT, {}, GOOD, 415),
    "multipart": ("POST", CHAT, {"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", 415),
    "too large": ("POST", TEXT, JSON, BIG, 413),
    "too many headers": ("POST", TEXT, JSON | {f"x-{index}": "y" for index in range(140)}, GOOD, 431),
    "headers too large": ("GET", "/v1/models", {f"x-{index}": "y" * 1000 for index in range(40)}, b"", 431),
    "path too large": ("GET", "/v1/models/" + "x" * 33_000, {}, b"", 431),
    "no such path": ("GET", "/v1/nothing", {}, b"", 404),
    "no such path to post to": ("POST", "/v2/completions", JSON, GOOD, 404),
    "up and out": ("GET", "/v1/models/../../etc/passwd%00", {}, b"", 404),
    "GET for POST": ("GET", CHAT, {}, b"", 405),
    "POST for GET": ("POST", "/v1/models", JSON, GOOD, 405),
    "PUT": ("PUT", TEXT, JSON, GOOD, 405),
    "DELETE": ("DELETE", "/health", {}, b"", 405),
    "an unknown method": ("BREW", CHAT, JSON, GOOD, 405),
    "OPTIONS": ("OPTIONS", CHAT, {}, b"", 405),
}


@pytest.mark.parametrize("what", BAD_MESSAGES)
def test_invalid_http_messages_are_refused(server: RunningServer, what: str) -> None:
    method, path, headers, body, status = BAD_MESSAGES[what]
    expect(server, HTTP.request(method, server.url + path, headers=headers, content=body), status, None)


def test_a_large_body_without_a_length_is_refused(server: RunningServer) -> None:
    pieces = (BIG[i : i + 2**16] for i in range(0, len(BIG), 2**16))
    expect(server, HTTP.post(server.url + TEXT, content=pieces, headers=JSON), 413, None)


def test_an_unknown_model_is_not_found(server: RunningServer) -> None:
    expect(server, server.post(CHAT, {"model": "other", "messages": HELLO}), 404, "model")
    expect(server, server.post(TEXT, {"model": "other", "prompt": "hello", "stream": True}), 404, "model")
    expect(server, server.get("/v1/models/other"), 404, "model")
    expect(server, server.post("/tokenize", {"model": "other", "prompt": "hello"}), 404, "model")


def test_an_invalid_streaming_request_has_an_error_status(server: RunningServer) -> None:
    expect(server, server.post(TEXT, {"model": NAME, "prompt": "hello", "stream": True, "top_p": 9}), 400, "top_p")
    expect(server, server.post(TEXT, {"model": NAME, "prompt": [1, 10**6], "stream": True}), 400, "prompt")


def test_null_means_absent(server: RunningServer) -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options", "logprobs", "user"]
    )
    assert server.post(CHAT, {"model": NAME, "messages": HELLO, "max_tokens": 2, **nulls}).status_code == 200
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert server.post(CHAT, {"model": NAME, "messages": parts, "max_tokens": 2}).status_code == 200


def test_no_blocks_or_requests_remain(server: RunningServer) -> None:
    server.post(TEXT, {"model": NAME, "prompt": "hello", "max_tokens": 2})
    server.wait_idle()
    assert server.metric("chairlift_requests_open") == 0
