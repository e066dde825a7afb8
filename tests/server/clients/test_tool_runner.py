"""The tool runner of the anthropic package: it runs the tools of a conversation, and asks for threads by default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from anthropic.types import ThreadUnsupportedRequestError

from chairlift.server.wire.messages import Submit, ToEngine, Update
from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import NAME, FrontEnd, ScriptedEngine, front_end
from tests.server.sample_tools import TOOL_TEMPLATE
from tests.server.test_message_types import LOADED
from tests.tiny import byte_level_tokenizer

CALL = '<tool_call>\n{"name": "lift_state", "arguments": {"lift": "north"}}\n</tool_call>'
MARKS = ["<tool_call>", "</tool_call>"]
TOKENIZER = Tokenizer(byte_level_tokenizer(more_special=MARKS), chat_template=TOOL_TEMPLATE)
QUESTION: list[Any] = [{"role": "user", "content": "Is the north lift open?"}]


@beta_tool
def lift_state(lift: str) -> str:
    """Whether a lift is open.

    Args:
        lift: Its name
    """
    return f"the {lift} lift is open"


def call_then_answer(engine: ScriptedEngine, message: ToEngine) -> None:
    """Calls the tool, and answers once the prompt has its result."""
    if isinstance(message, Submit):
        seen = "the north lift is open" in TOKENIZER.decode(message.prompt)
        text = "Yes, it is." if seen else f"I look. {CALL}"
        engine.publish(Update(message.request_id, text=text, tokens=[5], cached_tokens=0))
        engine.publish(Update(message.request_id, tokens=[2], finish_reason="stop"))


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end(call_then_answer, tokenizer=TOKENIZER, loaded=LOADED) as running:
        yield running


def client_of(front: FrontEnd) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_runs_a_tool_and_ends_the_turn(front: FrontEnd, stream: bool) -> None:
    runner = client_of(front).beta.messages.tool_runner(
        model=NAME, max_tokens=100, messages=QUESTION, tools=[lift_state], stream=stream
    )
    final = runner.until_done()
    assert [block.type for block in final.content] == ["text"]
    assert final.content[0].text == "Yes, it is."
    assert final.stop_reason == "end_turn"


def test_a_thread_is_refused_with_the_code_that_the_client_knows(front: FrontEnd) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client_of(front).beta.messages.create(model=NAME, max_tokens=9, messages=QUESTION, thread=thread)
        assert isinstance(refused.value, ThreadUnsupportedRequestError)
        assert refused.value.request_id
        assert refused.value.body["request_id"] == refused.value.request_id  # type: ignore[index]
    answer = client_of(front).beta.messages.create(model=NAME, max_tokens=9, messages=QUESTION, thread=None)
    assert answer._request_id


def test_a_thread_continues_without_the_server(front: FrontEnd) -> None:
    thread = client_of(front).beta.messages.thread(
        model=NAME, max_tokens=100, tools=[lift_state], unsupported_request_behavior="continue_unthreaded"
    )
    first = thread.send(*QUESTION)
    assert [block.type for block in first.content] == ["text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "the north lift is open"}
    assert thread.send({"role": "user", "content": [result]}).content[0].text == "Yes, it is."
