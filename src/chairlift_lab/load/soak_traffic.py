"""The traffic of `chairlift bench soak`: random requests of many kinds, each with a check of its answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chairlift.client.http import EventLineParser

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
PATTERN = "[0-9]{2,4}-[a-f]{1,6}"
QUESTIONS = (
    "What is a chairlift?",
    "Name three colours of the rainbow.",
    "Why is the sky blue?",
    "Write a short poem about snow.",
    "Count from one to ten.",
    "Tell me about the sea, the sea, the sea.",
)
WORDS = ("snow", "lift", "valley", "sun", "ski")
WARM_UP_WORDS = 200
# By kind, how often it is chosen.
KINDS = {
    "greedy": 30,
    "sampled": 20,
    "several": 6,
    "json": 8,
    "regex": 6,
    "tool": 8,
    "long prompt": 4,
    "cancelled": 8,
    "killed": 6,
    "tokenize": 6,
    "invalid": 4,
}

Check = Callable[[int, bytes], str | None]
"""Returns what is wrong with an answer, given its status and body."""


@dataclass(frozen=True, slots=True)
class SoakRequest:
    kind: str
    path: str
    body: dict[str, Any]
    check: Check
    hang_up_after: float | None = None  # seconds after which the client disconnects


class SoakTraffic:
    """Random requests; greedy ones must be answered as in `references`, by question."""

    def __init__(self, model: str, seed: int, references: Mapping[str, str] | None = None) -> None:
        self._model = model
        self._rng = random.Random(seed)
        self._references = references or {}

    def request(self) -> SoakRequest:
        (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
        return self._make(kind)

    def reference_request(self, question: str) -> SoakRequest:
        """The request whose answer is the reference of a question."""
        return SoakRequest("reference", "/v1/chat/completions", self._greedy(question), expect_ok)

    def warm_up_request(self) -> SoakRequest:
        """A long prompt that differs from all others, and one token."""
        body = {"model": self._model, "prompt": self._words(WARM_UP_WORDS), "max_tokens": 1}
        return SoakRequest("warm-up", "/v1/completions", body, expect_ok)

    def _make(self, kind: str) -> SoakRequest:
        rng, question = self._rng, self._rng.choice(QUESTIONS)
        chat, completion = "/v1/chat/completions", "/v1/completions"
        sampled = self._chat(question, temperature=1.0, max_tokens=rng.randint(1, 48), seed=rng.randrange(1000))
        match kind:
            case "greedy":
                body = self._greedy(question) | {"stream": rng.random() < 0.5}
                return SoakRequest(kind, chat, body, self._same_as_reference(question))
            case "sampled":
                return SoakRequest(kind, chat, sampled | {"stream": rng.random() < 0.7}, expect_ok)
            case "several":
                return SoakRequest(kind, chat, sampled | {"n": 3}, expect_ok)
            case "json":
                schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
                body = sampled | {"response_format": schema, "max_tokens": 96, "stream": rng.random() < 0.5}
                return SoakRequest(kind, chat, body, _expect_json)
            case "regex":
                return SoakRequest(kind, chat, sampled | {"guided_regex": PATTERN, "max_tokens": 32}, _expect_pattern)
            case "tool":
                body = sampled | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 96}
                return SoakRequest(kind, chat, body | {"stream": rng.random() < 0.5}, _expect_call)
            case "long prompt":
                body = {
                    "model": self._model,
                    "prompt": self._words(rng.randint(50, 150)),
                    "max_tokens": 4,
                    "temperature": 0,
                }
                return SoakRequest(kind, completion, body, expect_ok)
            case "cancelled" | "killed":
                body = sampled | {"max_tokens": 200, "ignore_eos": True, "stream": kind == "cancelled", "n": 2}
                return SoakRequest(kind, chat, body, expect_ok, hang_up_after=rng.uniform(0.0, 0.6))
            case "tokenize":
                text = question * rng.choice((1, 10, 2000))
                return SoakRequest(kind, "/tokenize", {"prompt": text}, expect_ok)
            case _:
                wrong = rng.choice(({"temperature": -1}, {"n": 0}, {"guided_regex": "("}, {"temprature": 1}))
                return SoakRequest(kind, chat, sampled | wrong, _expect_refusal)

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=count))

    def _chat(self, question: str, **options: Any) -> dict[str, Any]:
        return {"model": self._model, "messages": [{"role": "user", "content": question}]} | options

    def _greedy(self, question: str) -> dict[str, Any]:
        return self._chat(question, temperature=0, max_tokens=32, ignore_eos=True)

    def _same_as_reference(self, question: str) -> Check:
        def check(status: int, body: bytes) -> str | None:
            if problem := expect_ok(status, body):
                return problem
            expected, answer = self._references.get(question), answer_text(body)
            return None if expected in (None, answer) else f"{answer!r} instead of {expected!r}"

        return check


def expect_ok(status: int, body: bytes) -> str | None:
    if status != 200:
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"
    if _is_stream(body) and not body.rstrip().endswith(b"[DONE]"):
        return "the stream is incomplete"
    return "an error in the stream" if b'data: {"error"' in body else None


def _expect_refusal(status: int, body: bytes) -> str | None:
    if status != 400 or "message" not in json.loads(body)["error"]:
        return f"HTTP {status} instead of 400"
    return None


def _expect_json(status: int, body: bytes) -> str | None:
    return expect_ok(status, body) or _json_problem(answer_text(body), is_complete=_finish_reason(body) == "stop")


def _expect_pattern(status: int, body: bytes) -> str | None:
    if problem := expect_ok(status, body):
        return problem
    text = answer_text(body)
    return None if re.fullmatch(PATTERN, text) else f"{text!r} does not match {PATTERN}"


def _expect_call(status: int, body: bytes) -> str | None:
    if problem := expect_ok(status, body):
        return problem
    arguments = {0: ""}  # There may be several calls.
    for choice in _choices(body):
        message = choice.get("message") or choice.get("delta") or {}
        for position, call in enumerate(message.get("tool_calls") or ()):
            number = call.get("index", position)  # only streamed calls have an index
            arguments[number] = arguments.get(number, "") + call["function"].get("arguments", "")
    is_complete = _finish_reason(body) != "length"
    problems = (_json_problem(text, is_complete=is_complete) for text in arguments.values())
    return next(filter(None, problems), None)


def _json_problem(text: str, *, is_complete: bool) -> str | None:
    """Check a text that must match SCHEMA, unless it was truncated."""
    if not is_complete:
        return None
    try:
        content = json.loads(text)
    except ValueError:
        return f"{text!r} is not JSON"
    return None if isinstance(content, dict) and content.keys() == {"city", "warm"} else f"{text!r} breaks the schema"


def _is_stream(body: bytes) -> bool:
    """Whether the body consists of events; a comment may come first while a request waits."""
    return body.startswith((b"data: ", b": "))


def _choices(body: bytes) -> list[dict[str, Any]]:
    """The choices of an answer, whole or streamed."""
    if not _is_stream(body):
        return list(json.loads(body)["choices"])
    events = [event for event in EventLineParser().feed(body) if event != b"[DONE]"]
    return [choice for event in events for choice in json.loads(event)["choices"]]


def answer_text(body: bytes) -> str:
    """The text of the first choice."""
    parts = [choice.get("message") or choice.get("delta") or {} for choice in _choices(body) if choice["index"] == 0]
    return "".join(part.get("content") or "" for part in parts)


def _finish_reason(body: bytes) -> str | None:
    return next((choice["finish_reason"] for choice in reversed(_choices(body)) if choice["finish_reason"]), None)
