"""langchain-openai: ChatOpenAI, OpenAI and OpenAIEmbeddings."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.clients.scenario import MESSAGES, QUESTION, Lift
from tests.server.running_server import NAME, RunningServer

pytestmark = pytest.mark.slow
langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed: pip install -e '.[clients]'"
)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, tool_server: RunningServer) -> Any:
    """A model that uses chat completions or the Responses API."""
    return langchain_openai.ChatOpenAI(
        model=NAME,
        base_url=f"{tool_server.url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        stream_usage=True,
        use_responses_api=request.param,
    )


def test_chat(chat: Any, expected: str) -> None:
    answer = chat.invoke(QUESTION, max_tokens=12)
    assert answer.text == expected
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.usage_metadata["input_tokens"] > 0
    batch = chat.batch([QUESTION] * 3, max_tokens=12)
    assert [each.text for each in batch] == [expected] * 3


def test_streamed_chat(chat: Any, expected: str) -> None:
    chunks = list(chat.stream(QUESTION, max_tokens=12))
    assert "".join(chunk.text for chunk in chunks) == expected
    assert sum(bool(chunk.text) for chunk in chunks) > 1
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata["output_tokens"] == 12


def test_asynchronous_stream(chat: Any, expected: str) -> None:
    async def text() -> str:
        return "".join([chunk.text async for chunk in chat.astream(QUESTION, max_tokens=12)])

    assert asyncio.run(text()) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool(chat: Any, stream: bool) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    @tool(args_schema=Lift)
    def lift(open: bool, side: str) -> str:
        """Whether a lift runs."""
        return f"{side}: {'open' if open else 'closed'}"

    bound = chat.bind_tools([lift], tool_choice="required")
    messages: list[Any] = [HumanMessage(QUESTION)]
    if stream:
        chunks = list(bound.stream(messages))
        answer = chunks[0]
        for chunk in chunks[1:]:
            answer += chunk
    else:
        answer = bound.invoke(messages)
    assert answer.tool_calls, answer
    assert not answer.invalid_tool_calls
    results = [lift.invoke(call) for call in answer.tool_calls]
    assert all(result.content.split(": ")[0] in ("north", "south") for result in results)
    # The answer and the results go back as langchain writes them.
    second = chat.bind_tools([lift]).invoke([*messages, answer, *results], max_tokens=12)
    assert second.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Lift, method=method).invoke(QUESTION), Lift)
    raw = chat.with_structured_output(Lift, method=method, include_raw=True).invoke(MESSAGES)
    assert raw["parsing_error"] is None
    assert isinstance(raw["parsed"], Lift)


def test_text_completion(tool_server: RunningServer) -> None:
    prompt = "a chairlift"
    model = langchain_openai.OpenAI(
        model=NAME, base_url=f"{tool_server.url}/v1", api_key="none", temperature=0, max_tokens=8
    )
    official = tool_server.client().completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0)
    assert model.invoke(prompt) == official.choices[0].text
    assert "".join(model.stream(prompt)) == official.choices[0].text


def test_embeddings(tool_server: RunningServer) -> None:
    model = langchain_openai.OpenAIEmbeddings(
        model=NAME,
        base_url=f"{tool_server.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,  # would tokenize with OpenAI's tokenizer
        max_retries=0,
    )
    texts = ["a chairlift", "an engine"]
    official = tool_server.client().embeddings.create(model=NAME, input=texts)
    for found, answer in zip(model.embed_documents(texts), official.data, strict=True):
        assert found == pytest.approx(answer.embedding, abs=1e-6)
    assert model.embed_query(texts[0]) == pytest.approx(official.data[0].embedding, abs=1e-6)


def test_errors(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat.invoke(QUESTION, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        chat.invoke(QUESTION, model="other")
    with pytest.raises(openai.BadRequestError) as long:
        chat.invoke("lift " * 3000)
    assert long.value.code == "context_length_exceeded"
