"""litellm, as a library that agents and gateways call servers with."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.clients.scenario import LIFT_TOOL, MESSAGES, Lift
from tests.server.running_server import NAME, RunningServer

pytestmark = pytest.mark.slow
litellm = pytest.importorskip("litellm", reason="litellm is not installed: pip install -e '.[clients]'")

PROVIDERS = ["openai", "hosted_vllm"]


@pytest.fixture(params=PROVIDERS)
def options(request: pytest.FixtureRequest, tool_server: RunningServer) -> dict[str, Any]:
    """The arguments of a call that name the server."""
    return {
        "model": f"{request.param}/{NAME}",
        "api_base": f"{tool_server.url}/v1",
        "api_key": "none",
        "num_retries": 0,
        "max_retries": 0,
    }


def test_chat(options: dict[str, Any], expected: str) -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=12, temperature=0, **options)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_streamed_chat(options: dict[str, Any], expected: str) -> None:
    stream = litellm.completion(
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12


def test_concurrent_calls(options: dict[str, Any], expected: str) -> None:
    async def calls() -> list[Any]:
        call = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **options}
        return await asyncio.gather(*(litellm.acompletion(**call) for _ in range(4)))

    assert [answer.choices[0].message.content for answer in asyncio.run(calls())] == [expected] * 4


def test_text_completion(options: dict[str, Any], tool_server: RunningServer) -> None:
    body = {"prompt": "a chairlift", "max_tokens": 8, "temperature": 0}
    official = tool_server.client().completions.create(model=NAME, **body).choices[0].text
    if options["model"].startswith("openai/"):  # the provider for chat completions by /v1/completions
        options["model"] = f"text-completion-openai/{NAME}"
    assert litellm.text_completion(**body, **options).choices[0].text == official


@pytest.mark.parametrize("stream", [False, True])
def test_tools(options: dict[str, Any], stream: bool) -> None:
    call = {"tools": [LIFT_TOOL], "temperature": 0, "stream": stream, **options}
    answer = litellm.completion(messages=MESSAGES, tool_choice="required", **call)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls[0].function.name == "Lift"
    Lift.model_validate_json(message.tool_calls[0].function.arguments)
    # The message goes back as litellm made it, with the results of its calls.
    results = [{"role": "tool", "tool_call_id": each.id, "content": "closed"} for each in message.tool_calls]
    turn = [*MESSAGES, message.model_dump(), *results]
    second = litellm.completion(messages=turn, max_tokens=12, tools=[LIFT_TOOL], **options)
    assert second.usage.prompt_tokens > answer.usage.prompt_tokens


def test_structured_output(options: dict[str, Any]) -> None:
    typed = litellm.completion(messages=MESSAGES, response_format=Lift, temperature=0, **options)
    Lift.model_validate_json(typed.choices[0].message.content)
    anything = litellm.completion(
        messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=300, seed=1, **options
    )
    if anything.choices[0].finish_reason == "stop":  # a random model may not end
        assert isinstance(json.loads(anything.choices[0].message.content), dict)


def test_embeddings(options: dict[str, Any], tool_server: RunningServer) -> None:
    texts = ["a chairlift", "an engine"]
    official = tool_server.client().embeddings.create(model=NAME, input=texts)
    answer = litellm.embedding(input=texts, **options)
    assert [each["embedding"] for each in answer.data] == [
        pytest.approx(each.embedding, abs=1e-6) for each in official.data
    ]
    assert answer.usage.prompt_tokens == official.usage.prompt_tokens


def test_rerank(tool_server: RunningServer) -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{NAME}",
        query="a chairlift",
        documents=["an engine", "a chairlift"],
        top_n=1,
        api_base=tool_server.url,
        api_key="none",
    )
    assert [result["index"] for result in answer.results] == [1]
    assert answer.results[0]["relevance_score"] == pytest.approx(1, abs=1e-3)


def test_anthropic_messages(tool_server: RunningServer, expected: str) -> None:
    answer = litellm.completion(
        model=f"anthropic/{NAME}",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        api_base=tool_server.url,
        api_key="none",
    )
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"temperature": -1}, "BadRequestError"),
        ({"messages": [{"role": "user", "content": "lift " * 3000}]}, "ContextWindowExceededError"),
        ({"model": "other"}, "NotFoundError"),
    ],
)
def test_errors_have_the_types_that_routers_act_on(options: dict[str, Any], change: dict[str, Any], error: str) -> None:
    call = {"messages": MESSAGES, "max_tokens": 4, **options, **change}
    call["model"] = options["model"].split("/")[0] + "/" + call["model"].split("/")[-1]
    with pytest.raises(getattr(litellm, error)) as raised:
        litellm.completion(**call)
    assert type(raised.value).__name__ == error
