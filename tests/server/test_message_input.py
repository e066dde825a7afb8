"""What real clients send to /v1/messages: fields with and without effect, odd histories, and long conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.endpoint import MessagesGeneration, renamed
from chairlift.server.anthropic.input import MessageInput
from chairlift.server.anthropic.types import CLEARED, ContextManagement, CountTokensRequest, MessagesRequest
from chairlift.server.generation.endpoint import parse_at
from chairlift.server.served_model import ServedModel
from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import NAME as SCRIPTED
from tests.server.front_end import FrontEnd, front_end
from tests.server.running_server import HTTP, NAME, RunningServer
from tests.server.sample_tools import THINKING_TEMPLATE, TOOL_TEMPLATE
from tests.server.test_message_types import LOADED
from tests.server.test_messages import PATH, QUESTION, SEARCH, WEATHER, events_of, user
from tests.tiny import CHATML, byte_level_tokenizer

HINT = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
CUT_CALL = {"type": "tool_use", "id": "t1", "name": "get_weather"}
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": HINT}]}
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
QUESTIONS = [{"type": "text", "text": "Is it open?"}]
ANSWER = {"role": "assistant", "content": "no"}

ACCEPTED: list[dict[str, Any]] = [
    # Models that do not reason satisfy any of these.
    {
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": KEEP_ALL,
    },
    {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "updates"}},
    {"thinking": {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "error"}}},
    {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
    {"output_config": {"effort": "low"}},
    # Messages.
    {"messages": [*QUESTION, SYSTEM]},
    {
        "messages": [SYSTEM, *QUESTION, SYSTEM, {"role": "assistant", "content": "no"}, *QUESTION],
        "system": "You are short",
    },
    {"messages": [*QUESTION, {"role": "assistant", "content": []}, *QUESTION]},
    {"messages": [*QUESTION, {"role": "assistant", "content": []}]},
    {"messages": [*QUESTION, {"role": "assistant", "content": [CUT_CALL]}, *QUESTION]},
    {"messages": [*QUESTION, {"role": "assistant", "content": [CUT_CALL | {"input": None}]}, *QUESTION]},
    {
        "messages": [
            *QUESTION,
            {"role": "assistant", "content": [CUT_CALL | {"input": {"_invalid_json": "{"}}]},
            *QUESTION,
        ]
    },
    {"messages": [user({"type": "text", "text": ""}, {"type": "text", "text": "hi", "citations": None})]},
    {"messages": [user(SEARCH), *QUESTION]},
    # Fields without effect here.
    {"cache_control": HINT, "metadata": {"user_id": "u" * 400}, "service_tier": "standard_only", "speed": "fast"},
    {"fallbacks": [{"model": "other"}], "mcp_servers": [], "container": None, "thread": None},
    {"stop_sequences": ["", "END", ""]},
    {"stop_sequences": [""]},
    {"model": None, "top_p": 0, "temperature": 1.0, "top_k": 0},
    {"output_format": {"type": "json_schema", "schema": {"type": "boolean"}}},
    {"context_management": {"edits": []}},
    {"context_management": {"edits": [{"type": "compact_20260112"}, {"type": "clear_tool_uses_20250919"}]}},
]


@pytest.mark.parametrize("change", ACCEPTED, ids=[f"{'-'.join(change)}-{i}" for i, change in enumerate(ACCEPTED)])
def test_it_is_accepted(server: RunningServer, change: dict[str, Any]) -> None:
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 2} | change
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    assert "x-chairlift-ignored-fields" not in answer.headers
    counted = ("messages", "thinking", "output_config", "context_management", "system", "model")
    count = server.post(f"{PATH}/count_tokens", {name: body[name] for name in counted if name in body})
    assert count.status_code == 200, count.text
    usage = answer.json()["usage"]
    assert count.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_other_documented_fields_are_said_to_be_ignored(server: RunningServer) -> None:
    body = {"model": NAME, "messages": [*QUESTION, {**SYSTEM, "output_config": {"effort": "low"}}], "max_tokens": 2}
    body |= {"inference_geo": "eu", "diagnostics": {"previous_message_id": "msg_1"}, "metadata": {"team": "lifts"}}
    body |= {"output_config": {"task_budget": {"type": "tokens", "total": 1000}}, "user_profile_id": "u"}
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-chairlift-ignored-fields"].split(", ")) == {
        *("inference_geo", "diagnostics", "metadata.team", "output_config.task_budget", "user_profile_id"),
        "messages[1].output_config",
    }


def test_beta_headers_and_no_headers_are_taken(server: RunningServer) -> None:
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 2}
    headers = {"anthropic-beta": "a-beta-of-2031-01-01,another", "anthropic-version": "2099-12-31"}
    assert HTTP.post(f"{server.url}{PATH}?beta=true", json=body, headers=headers).status_code == 200


ALWAYS_REASONS = TOOL_TEMPLATE.replace(
    "{{ message.content }}", "<think>{{ message.reasoning_content }}</think>{{ message.content }}"
).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, ""),
        ({"output_config": {"effort": "max"}}, ""),
        ({"thinking": {"type": "disabled"}}, "thinking: this model always reasons"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "thinking: this model always reasons"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: must be at least 1"),
    ],
)
def test_models_that_always_reason_refuse_only_not_to(change: dict[str, Any], refused: str) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(more_special=["<think>", "</think>"]), chat_template=ALWAYS_REASONS)
    model = ServedModel.create("m", tokenizer)
    assert model.reasoning_format is not None
    body = MessagesRequest(messages=QUESTION, max_tokens=2, **change)

    def tokenize() -> None:
        MessagesGeneration(body, model, "req-1").tokenize(1000)

    if not refused:
        tokenize()
        return
    with pytest.raises(InvalidParameter) as error:
        tokenize()
    assert str(renamed(error.value, body)).startswith(refused)


def test_errors_of_the_effort_name_what_set_it() -> None:
    effort = {"effort": "high"}
    for change, named in (
        ({"output_config": effort}, "output_config.effort"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"thinking": {"type": "disabled"}, "output_config": effort}, "thinking"),
        ({"thinking": {"type": "adaptive"}, "output_config": effort}, "output_config.effort"),
    ):
        body = MessagesRequest(messages=QUESTION, max_tokens=2, **change)
        assert renamed(InvalidParameter("reasoning_effort", "no"), body).parameter == named


def claude_code_body(session: str) -> dict[str, Any]:
    """The second request of Claude Code 2.1.197 in a session, with shorter texts."""
    ephemeral = {"type": "ephemeral"}
    call = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Oslo", "days": 1}}
    result = {"tool_use_id": "call_1", "type": "tool_result", "content": "snow", "is_error": False}
    return {
        "model": NAME,
        "messages": [
            user({"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>\n\n"}, *QUESTIONS),
            {"role": "system", "content": "These agents are available: none"},
            {"role": "assistant", "content": [call]},
            user(result | {"cache_control": ephemeral}),
        ],
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.197.{session}; cc_entrypoint=sdk-cli;",
            },
            {"type": "text", "text": "You are an agent.", "cache_control": ephemeral},
            {"type": "text", "text": "\nYou help with lifts.", "cache_control": ephemeral | {"scope": "global"}},
        ],
        "tools": [{name: value for name, value in WEATHER.items() if name != "strict"}],
        "metadata": {"user_id": '{"device_id":"0123","account_uuid":"","session_id":"4567"}'},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": KEEP_ALL,
        "output_config": {"effort": "high"},
        "stream": True,
    }


def test_the_request_of_claude_code_is_answered(tool_server: RunningServer) -> None:
    betas = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24"
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": betas, "x-api-key": "none", "x-app": "cli"}
    lengths = set()
    for session in ("eff", "7d0 and longer"):
        body = claude_code_body(session) | {"max_tokens": 3}
        answer = HTTP.post(f"{tool_server.url}{PATH}?beta=true", json=body, headers=headers)
        assert "x-chairlift-ignored-fields" not in answer.headers
        usage = events_of(answer)[-2]["usage"]
        lengths.add(usage["input_tokens"] + usage["cache_read_input_tokens"])
    assert len(lengths) == 1


# ---- messages ---------------------------------------------------------------------------------------------------


def chat(*messages: Any, **options: Any) -> list[dict[str, Any]]:
    return MessageInput(list(messages), **options).messages


def test_messages_of_one_role_are_one_turn() -> None:
    assert chat(*QUESTION, user({"type": "text", "text": "now"})) == [
        {"role": "user", "content": f"{QUESTION[0]['content']}\nnow"}
    ]
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    parts = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}]},
        {"role": "assistant", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "yes"}, call]},
    ]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert chat(*QUESTION, *parts)[1:] == [
        {
            "role": "assistant",
            "content": "yes",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t", "type": "function", "function": function}],
        }
    ]


def test_a_later_message_of_the_system_stays_or_joins_what_is_before_it() -> None:
    result = user({"type": "tool_result", "tool_use_id": "t", "content": "42"})
    given = [*QUESTION, SYSTEM, {"role": "assistant", "content": "a"}, result, SYSTEM]
    assert [message["role"] for message in chat(*given)] == ["user", "system", "assistant", "tool", "system"]
    folded = chat(*given, later_system=False)
    assert [message["role"] for message in folded] == ["user", "assistant", "tool"]
    assert folded[2]["content"] == "42\n<system>\nBe brief.\n</system>"
    assert [message["role"] for message in chat(SYSTEM, *QUESTION, later_system=False)] == ["system", "user"]
    temporary = {**SYSTEM, "clear_at": "next_user_message"}
    answer = {"role": "assistant", "content": "a"}
    assert [message["role"] for message in chat(*QUESTION, temporary, answer, *QUESTION)] == [
        "user",
        "assistant",
        "user",
    ]
    assert chat(*QUESTION, temporary)[1]["role"] == "system"


def test_it_is_known_whether_a_template_shows_the_system_in_mid_conversation() -> None:
    drops = CHATML.replace("for message in messages", "for message in messages[:2] + messages[3:]")
    refuses = "{% if messages[2].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    for template, shown in ((CHATML, True), (drops, False), (refuses, False)):
        tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=template)
        assert tokenizer.template_shows_later_system is shown, template


def test_texts_in_other_blocks_are_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "All lifts stop at 5."}
    document = {"type": "document", "source": source, "title": "Hours", "context": "winter"}
    (message,) = chat(user(document, SEARCH))
    assert message["content"].split("\n") == [
        *("Hours", "winter", "All lifts stop at 5."),
        *("The lifts", "https://lifts.example", "All are open."),
    ]
    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    (result,) = chat(user({"type": "tool_result", "tool_use_id": "t", "content": [reference, document]}))
    assert "get_weather" in result["content"]
    assert "All lifts" in result["content"]
    (failed,) = chat(user({"type": "tool_result", "tool_use_id": "t", "content": "no such lift", "is_error": True}))
    assert failed["content"] == "Error: no such lift"


# ---- tools ------------------------------------------------------------------------------------------------------


def shown_tools(*messages: Any, **change: Any) -> list[dict[str, Any]]:
    body = CountTokensRequest(model="m", messages=[*QUESTION, *messages], **change)
    return [tool["function"] for tool in body.as_chat(reasons=False).tools or []]


def test_deferred_tools_are_shown_once_a_result_refers_to_them() -> None:
    tools = [WEATHER, {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}]
    assert [tool["name"] for tool in shown_tools(tools=tools)] == ["get_weather"]
    reference = {"type": "tool_reference", "tool_name": "later"}
    found = user({"type": "tool_result", "tool_use_id": "t", "content": [reference]})
    assert [tool["name"] for tool in shown_tools(found, tools=tools)] == ["get_weather", "later"]


def test_examples_are_shown_with_the_description() -> None:
    tool = {
        "name": "f",
        "input_schema": {"type": "object"},
        "input_examples": [{"a": 1}],
        "allowed_callers": ["direct"],
    }
    assert shown_tools(tools=[tool])[0]["description"] == 'Examples of its input:\n{"a": 1}'
    (described,) = shown_tools(tools=[tool | {"description": "Does it."}])
    assert described["description"] == 'Does it.\n\nExamples of its input:\n{"a": 1}'


# ---- lengths ----------------------------------------------------------------------------------------------------


def test_a_message_may_fill_the_context(server: RunningServer) -> None:
    """Claude Code asks for 32,000 tokens whatever the model's context is."""
    (model,) = server.get("/v1/models").json()["data"]
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 32_000, "ignore_eos": True}
    message = server.post(PATH, body).json()
    assert message["stop_reason"] == "model_context_window_exceeded"
    usage = message["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert total == model["max_model_len"]
    exact = server.post(PATH, body | {"max_tokens": usage["output_tokens"]}).json()
    assert exact["stop_reason"] == "max_tokens"


def test_no_tokens_fill_the_prefix_cache(server: RunningServer) -> None:
    messages = [
        {"role": "user", "content": "a question that nobody else asks in these tests, long enough to be cached"}
    ]
    body = {"model": NAME, "messages": messages, "max_tokens": 0}
    first = server.post(PATH, body).json()
    assert (first["content"], first["stop_reason"], first["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    again = server.post(PATH, body | {"max_tokens": 1}).json()
    assert again["usage"]["cache_read_input_tokens"] > 0


# ---- context management -----------------------------------------------------------------------------------------


def turn(number: int) -> list[dict[str, Any]]:
    thinking = {"type": "thinking", "thinking": f"thought {number}", "signature": "s"}
    call = {"type": "tool_use", "id": f"t{number}", "name": "get_weather", "input": {"city": "Bern", "days": number}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"It snows in {number} places. " * 4}
    return [{"role": "assistant", "content": [thinking, call]}, user(result)]


CONVERSATION = [*QUESTION, *turn(1), *turn(2), *turn(3), *turn(4)]


def change(num_tokens: int = 0, **edit: Any) -> Any:
    (parsed,) = parse_at("", ContextManagement, {"edits": [edit]}).edits or ()
    return parsed.change(CONVERSATION, num_tokens)


def results(messages: list[dict[str, Any]]) -> list[str]:
    return [block["content"] for message in messages[2::2] for block in message["content"]]


def test_the_results_of_old_tool_uses_are_cleared() -> None:
    clear = {"type": "clear_tool_uses_20250919"}
    assert change(100_000, **clear) is None
    messages, report = change(100_001, **clear)
    assert report == {"type": clear["type"], "cleared_tool_uses": 1}
    assert [text == CLEARED for text in results(messages)] == [True, False, False, False]
    assert results(CONVERSATION)[0] != CLEARED  # the client's messages are as they were
    by_uses = clear | {"trigger": {"type": "tool_uses", "value": 3}, "keep": {"type": "tool_uses", "value": 2}}
    messages, _ = change(**by_uses, clear_tool_inputs=True)
    assert [text == CLEARED for text in results(messages)] == [True, True, False, False]
    assert [message["content"][1]["input"] == {} for message in messages[1::2]] == [True, True, False, False]
    messages, _ = change(**by_uses, clear_tool_inputs=["another"])
    assert messages[1]["content"][1]["input"]
    assert change(**by_uses | {"trigger": {"type": "tool_uses", "value": 4}}) is None
    assert change(**by_uses, exclude_tools=["get_weather"]) is None


def test_old_thinking_is_cleared() -> None:
    clear = {"type": "clear_thinking_20251015"}
    assert change(**clear, keep="all") is None
    assert change(**clear, keep={"type": "all"}) is None
    assert change(**clear, keep={"type": "thinking_turns", "value": 4}) is None
    messages, report = change(**clear, keep={"type": "thinking_turns", "value": 3})
    assert report["cleared_thinking_turns"] == 1
    assert [len(message["content"]) for message in messages[1::2]] == [1, 2, 2, 2]
    assert change(**clear)[1]["cleared_thinking_turns"] == 3


def test_no_summary_is_written() -> None:
    assert change(50, type="compact_20260112", trigger={"type": "input_tokens", "value": 50}) is None
    with pytest.raises(InvalidParameter, match="context_management"):
        change(51, type="compact_20260112", trigger={"type": "input_tokens", "value": 50})


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer = Tokenizer(byte_level_tokenizer(more_special=marks), chat_template=THINKING_TEMPLATE)
    with front_end(tokenizer=tokenizer, loaded=LOADED) as running:
        yield running


def test_the_answer_says_what_was_cleared(front: FrontEnd) -> None:
    clear = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}}
    edits = [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}, clear]
    body: dict[str, Any] = {"model": SCRIPTED, "messages": CONVERSATION, "context_management": {"edits": edits}}
    count = HTTP.post(f"{front.url}{PATH}/count_tokens", json=body).json()
    client = anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0)
    message = client.beta.messages.create(**body, max_tokens=5)
    assert message.context_management is not None
    thinking, uses = message.context_management.applied_edits
    assert (thinking.type, uses.type) == ("clear_thinking_20251015", "clear_tool_uses_20250919")
    saved = thinking.cleared_input_tokens + uses.cleared_input_tokens
    assert saved == count["context_management"]["original_input_tokens"] - count["input_tokens"] > 0
    assert message.usage.input_tokens == count["input_tokens"]
    with client.beta.messages.stream(**body, max_tokens=5) as stream:
        final = stream.get_final_message()
    assert final.context_management == message.context_management
    least = clear | {"clear_at_least": {"type": "input_tokens", "value": uses.cleared_input_tokens + 1}}
    refused = HTTP.post(front.url + PATH, json=body | {"max_tokens": 5, "context_management": {"edits": [least]}})
    assert refused.json()["context_management"] == {"applied_edits": []}
