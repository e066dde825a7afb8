"""Requests as real clients send them are accepted, and responses match OpenAI's document."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pydantic
import pytest

from chairlift.text.tokenizer import Tokenizer
from tests.server import openai_document
from tests.server.front_end import front_end
from tests.server.running_server import NAME, RunningServer
from tests.server.sample_tools import WEATHER
from tests.tiny import CHATML, byte_level_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
IGNORED = "x-chairlift-ignored-fields"
HELLO = [{"role": "user", "content": "hello"}]


def chat(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.post(CHAT, {"model": NAME, "messages": HELLO, "max_tokens": 3, **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- the document ---------------------------------------------------------------------------------------------------

CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "temperature": 1.0},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"service_tier": "auto"},
    {"stop": "e", "max_tokens": 20},
    {"response_format": {"type": "json_object"}, "max_tokens": 20},
]
CALLS: list[dict[str, Any]] = [
    {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60},
    {"tools": [WEATHER], "tool_choice": "auto", "logprobs": True, "top_logprobs": 1, "max_tokens": 10},
]
TEXTS: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 2, "n": 2, "temperature": 1.0},
    {"prompt": ["a", "b"], "echo": True},
]


@pytest.mark.parametrize("fields", [*CHATS, *CALLS])
def test_chat_completions_match_the_document(
    server: RunningServer, tool_server: RunningServer, fields: dict[str, Any]
) -> None:
    where = tool_server if "tools" in fields else server
    whole = chat(where, **fields)
    assert whole.status_code == 200, whole.text
    openai_document.check("CreateChatCompletionResponse", whole.json())
    assert whole.json().get("service_tier") == ("default" if "service_tier" in fields else None)
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = events_of(chat(where, stream=True, **fields, **options))
        for event in events:
            openai_document.check("CreateChatCompletionStreamResponse", event)
        # With include_usage all chunks have the field, and only the last one has figures.
        assert [("usage" in event, bool(event.get("usage"))) for event in events] == [
            (bool(options), bool(options) and event is events[-1]) for event in events
        ]


@pytest.mark.parametrize("fields", TEXTS)
def test_completions_match_the_document(server: RunningServer, fields: dict[str, Any]) -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 3} | fields
    answer = server.post(TEXT, body).json()
    openai_document.check("CreateCompletionResponse", answer)
    for event in events_of(server.post(TEXT, body | {"stream": True, "stream_options": {"include_usage": True}})):
        for choice in event["choices"]:  # the document has no null here, which OpenAI's own streams send
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        openai_document.check("CreateCompletionResponse", event)


def test_embeddings_match_the_document(server: RunningServer) -> None:
    answer = server.post("/v1/embeddings", {"model": NAME, "input": ["a", "b"]}).json()
    openai_document.check("CreateEmbeddingResponse", answer)


def test_the_document_is_checked() -> None:
    good = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a", "refusal": None},
                "logprobs": {"content": [], "refusal": None},
                "finish_reason": "stop",
            }
        ],
    }
    openai_document.check("CreateChatCompletionResponse", good)
    bad = json.loads(json.dumps(good))
    del bad["choices"][0]["logprobs"]["refusal"]
    with pytest.raises(AssertionError, match="refusal"):
        openai_document.check("CreateChatCompletionResponse", bad)
    with pytest.raises(pydantic.ValidationError):
        openai_document.check("CreateChatCompletionResponse", good | {"created": "1"})


# ---- figures --------------------------------------------------------------------------------------------------------


def test_top_logprobs_have_the_sampled_token(server: RunningServer) -> None:
    for top in (0, 1, 3):
        body = {"model": NAME, "prompt": "hello", "max_tokens": 8, "logprobs": top, "temperature": 1.5, "seed": 3}
        (choice,) = server.post(TEXT, body).json()["choices"]
        found = choice["logprobs"]
        for token, logprob, tops in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert tops[token] == logprob
            assert max(1, top) <= len(tops) <= top + 1


def test_continuous_usage_begins_with_no_token_and_needs_include_usage(server: RunningServer) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(chat(server, stream=True, stream_options=both, max_tokens=4, ignore_eos=True))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == 0
    assert counts[-2:] == [4, 4]
    assert counts[:-1] == sorted(set(counts))
    assert all(
        event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + count
        for event, count in zip(events, counts, strict=True)
    )
    silent = both | {"include_usage": False}
    assert not any("usage" in event for event in events_of(chat(server, stream=True, stream_options=silent)))


# ---- values that clients send ---------------------------------------------------------------------------------------


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_top_p_0_is_the_most_likely_token(server: RunningServer) -> None:
    greedy = text_of(chat(server, temperature=0, max_tokens=12))
    assert text_of(chat(server, temperature=1.7, top_p=0, max_tokens=12)) == greedy
    assert text_of(chat(server, temperature=100, top_p=0, max_tokens=12)) == greedy


def test_negative_seeds(server: RunningServer) -> None:
    texts = [text_of(chat(server, temperature=1.5, seed=seed, max_tokens=12)) for seed in (-5, -5, -6)]
    assert texts[0] == texts[1] != texts[2]
    drawn = {text_of(chat(server, temperature=1.5, seed=-1, max_tokens=12)) for _ in range(4)}
    assert len(drawn) > 1  # no seed


def test_an_empty_stop_string_stops_nothing(server: RunningServer) -> None:
    whole = text_of(chat(server, temperature=0, max_tokens=12))
    for stop in ("", [""], ["", "\x00never"], []):
        assert text_of(chat(server, temperature=0, max_tokens=12, stop=stop)) == whole


def test_the_served_model_is_used_without_a_name(server: RunningServer) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
        for model in ({}, {"model": None}):
            answer = server.post(path, {**body, **model})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == NAME


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object", "schema": {"const": "42"}},
        {"type": "json_schema", "json_schema": {"schema": {"const": "42"}}},
    ],
)
def test_schemas_in_other_forms(server: RunningServer, response_format: dict[str, Any]) -> None:
    assert text_of(chat(server, response_format=response_format, max_tokens=10)) == '"42"'


DOCUMENTED: dict[str, Any] = {
    "store": True,
    "metadata": {"session": "1"},
    "service_tier": "auto",
    "prediction": {"type": "content", "content": "hello"},
    "modalities": ["text"],
    "verbosity": "medium",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "safety_identifier": "someone",
    "user": "someone",
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_parameters_are_accepted_and_change_nothing(server: RunningServer, name: str) -> None:
    plain = text_of(chat(server, temperature=0))
    response = chat(server, temperature=0, **{name: DOCUMENTED[name]})
    assert text_of(response) == plain
    assert IGNORED not in response.headers


def test_what_would_change_the_answer_is_refused_or_named(server: RunningServer) -> None:
    for fields in (
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"web_search_options": {}},
        {"functions": [{"name": "f"}]},
        {"messages": [*HELLO, {"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
        {"messages": [{"role": "assistant", "audio": {"id": "x"}}, *HELLO]},
    ):
        assert chat(server, **fields).status_code == 400, fields
    assert chat(server, verbosity="low").headers[IGNORED] == "verbosity"


def test_the_answer_may_begin_with_the_message_that_it_continues(server: RunningServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "An apple"}]}]
    continued = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "temperature": 0}
    plain = text_of(chat(server, **continued))
    assert text_of(chat(server, **continued, echo=True)) == "An apple" + plain
    events = events_of(chat(server, **continued, echo=True, stream=True))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "An apple" + plain
    assert text_of(chat(server, temperature=0, echo=True)) == text_of(chat(server, temperature=0))


def test_history_as_clients_send_it_back(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"city": "Os'}}
    for message in (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "Yes.", "refusal": None, "annotations": [], "audio": None, "parsed": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ):
        response = chat(server, messages=[*HELLO, message, *HELLO])
        assert response.status_code == 200, response.text
        assert IGNORED not in response.headers


def test_tools_as_clients_name_and_choose_them(described_server: RunningServer) -> None:
    untyped = {"function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    named = {"type": "function", "function": {"name": "other"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    response = chat(described_server, tools=[WEATHER, untyped], tool_choice=choice, max_tokens=60)
    assert response.status_code == 200, response.text
    assert IGNORED not in response.headers
    calls = response.json()["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"other"}


def test_an_empty_suffix_is_none(server: RunningServer) -> None:
    texts = [
        server.post(TEXT, {"prompt": "hello", "max_tokens": 3, "temperature": 0, **more}).json()["choices"][0]["text"]
        for more in ({}, {"suffix": ""})
    ]
    assert texts[0] == texts[1]


# ---- recorded bodies ------------------------------------------------------------------------------------------------

READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
# The shapes of GitHub Copilot's chat requests (IEndpointBody and CAPIChatMessage of microsoft/vscode-copilot-chat).
COPILOT: dict[str, dict[str, Any]] = {
    "a question": {
        "messages": [
            {"role": "system", "content": "You are an AI programming assistant."},
            {"role": "user", "content": "Fix this."},
        ],
        "temperature": 0.1,
        "top_p": 1,
        "max_tokens": 4,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "an agent's turn": {
        "messages": [
            {
                "role": "system",
                "content": [{"type": "text", "text": "Act."}],
                "copilot_cache_control": {"type": "ephemeral"},
            },
            {"role": "user", "content": [{"type": "text", "text": "Look."}], "copilot_references": []},
            {
                "role": "assistant",
                "content": "",
                "reasoning_opaque": "abc",
                "reasoning_text": "I look.",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path":"a"}'}}
                ],
            },
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": "text",
                "copilot_cache_control": {"type": "ephemeral"},
            },
        ],
        "temperature": 0,
        "top_p": 1,
        "max_tokens": 4,
        "tools": [READ_FILE],
        "tool_choice": "auto",
        "stream": True,
        "thinking_budget": 4000,
        "snippy": {"enabled": False},
        "intent": True,
        "intent_threshold": 0.7,
        "state": "enabled",
    },
    "an edit with a prediction": {
        "messages": [{"role": "user", "content": "Rename it."}],
        "prediction": {"type": "content", "content": "def f(): ..."},
        "max_tokens": 4,
        "temperature": 0,
        "top_p": 1,
        "n": 1,
        "stream": True,
        "reasoning": {"effort": "medium"},
    },
}


@pytest.mark.parametrize("name", COPILOT)
def test_copilots_requests_are_accepted(described_server: RunningServer, name: str) -> None:
    # It adds /chat/completions to the address that the user gives.
    response = described_server.post(CHAT, {"model": NAME, **COPILOT[name]})
    for event in events_of(response):
        openai_document.check("CreateChatCompletionStreamResponse", event)
    ignored = response.headers.get(IGNORED, "")
    assert ("snippy" in ignored) == ("snippy" in COPILOT[name])
    assert ("copilot_cache_control" in ignored) == ("agent" in name)


# ---- scores and embeddings ------------------------------------------------------------------------------------------


def test_scores_by_all_of_vllms_names(server: RunningServer) -> None:
    names = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
    answers = [server.post("/score", {first: "a b", second: ["a b", "c"]}).json() for first, second in names]
    assert len({json.dumps(answer["data"]) for answer in answers}) == 1
    for body, parameter in (
        ({"queries": "a"}, "text_2"),
        ({"queries": "a", "text_1": "a", "text_2": "b"}, "queries"),
        ({"queries": "", "documents": "b"}, "queries"),
        ({"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
    ):
        answer = server.post("/score", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)


def test_rerank_in_the_form_of_text_embeddings_inference(server: RunningServer) -> None:
    texts = ["c", "a b", "d"]
    plain = server.post("/rerank", {"query": "a b", "documents": texts}).json()["results"]
    answer = server.post("/rerank", {"query": "a b", "texts": texts, "raw_scores": False, "truncate": True}).json()
    assert answer == [{"index": one["index"], "score": one["relevance_score"]} for one in plain]
    shown = server.post("/rerank", {"query": "a b", "texts": texts, "return_text": True}).json()
    assert shown[0] == {"index": 1, "score": plain[0]["relevance_score"], "text": "a b"}
    for body, parameter in (
        ({"query": "a"}, "documents"),
        ({"query": "a", "texts": ["a"], "documents": ["a"]}, "documents"),
        ({"query": "a", "texts": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "texts": ["a"], "return_documents": True}, "return_documents"),
        ({"query": "a", "texts": [""]}, "texts"),
        ({"query": "a", "texts": ["a"], "raw_scores": True}, "raw_scores"),
    ):
        refused = server.post("/rerank", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter)


def test_tokenize_in_the_form_of_llama_cpp(server: RunningServer) -> None:
    plain = server.post("/tokenize", {"prompt": "lift ü"}).json()["tokens"]
    whole = server.post("/tokenize", {"content": "lift ü", "add_special": True, "with_pieces": True}).json()["tokens"]
    assert [one["id"] for one in whole] == plain
    pieces = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in whole]
    assert b"".join(pieces).endswith("lift ü".encode())
    text = server.post("/detokenize", {"tokens": plain}).json()
    assert text["content"] == text["prompt"]
    for body in ({}, {"prompt": "a", "content": "a"}):
        assert server.post("/tokenize", body).status_code == 400


def test_tokenize_in_the_form_of_vllm(server: RunningServer) -> None:
    body = {"model": NAME, "prompt": "lift ü"}
    plain = server.post("/tokenize", body).json()
    assert plain["token_strs"] is None
    spelled = server.post("/tokenize", body | {"return_token_strs": True}).json()
    assert spelled == plain | {"token_strs": spelled["token_strs"]}
    assert "".join(spelled["token_strs"]) == "liftĠÃ¼"
    assert server.post("/detokenize", {"model": NAME, "tokens": plain["tokens"]}).json() == {"prompt": "lift ü"}


def test_a_conversation_is_tokenized_with_special_tokens_if_asked() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=CHATML, bos_token="<|endoftext|>", add_bos=True)
    with front_end(tokenizer=tokenizer) as front:
        plain, without, with_bos = (
            httpx.post(front.url + "/tokenize", json={"messages": HELLO, **fields}).json()["tokens"]
            for fields in ({}, {"add_special_tokens": False}, {"add_special_tokens": True})
        )
    assert plain == without
    assert with_bos == [0, *plain]


def test_grammars_in_the_form_of_llama_cpp(server: RunningServer) -> None:
    assert text_of(chat(server, grammar='root ::= "a"{5,5}', max_tokens=10)) == "aaaaa"
    assert text_of(chat(server, json_schema={"const": "42"}, max_tokens=10)) == '"42"'
    both = chat(server, grammar='root ::= "a"', guided_regex="a")
    assert both.json()["error"]["param"] == "grammar"


def test_a_conversation_is_embedded(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    by_tokens = server.post("/v1/embeddings", {"input": tokens}).json()
    by_messages = server.post("/v1/embeddings", {"messages": HELLO}).json()
    assert by_messages["usage"] == by_tokens["usage"]
    assert by_messages["data"][0]["embedding"] == pytest.approx(by_tokens["data"][0]["embedding"], abs=1e-6)
    for body, parameter in (
        ({"messages": HELLO, "input": "a"}, "input"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ):
        answer = server.post("/v1/embeddings", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)
