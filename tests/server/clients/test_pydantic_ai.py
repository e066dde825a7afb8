"""pydantic-ai: agents with tools and typed output, by chat completions and by the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.clients.scenario import QUESTION, Lift
from tests.server.running_server import NAME, RunningServer

pytestmark = pytest.mark.slow
pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: pip install -e '.[clients]'")


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(request: pytest.FixtureRequest, tool_server: RunningServer) -> Any:
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{tool_server.url}/v1", api_key="none")
    return getattr(models, request.param)(NAME, provider=provider)


def settings(**changes: Any) -> Any:
    return {"temperature": 0, **changes}


def test_text(model: Any, expected: str) -> None:
    answer = pydantic_ai.Agent(model).run_sync(QUESTION, model_settings=settings(max_tokens=12))
    assert answer.output == expected
    assert answer.usage.output_tokens == 12
    assert answer.response.finish_reason == "length"


def test_streamed_text(model: Any, expected: str) -> None:
    async def pieces() -> list[str]:
        agent = pydantic_ai.Agent(model)
        async with agent.run_stream(QUESTION, model_settings=settings(max_tokens=12)) as answer:
            return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]

    found = asyncio.run(pieces())
    assert "".join(found) == expected
    assert len(found) > 1


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_typed_output(model: Any, kind: str) -> None:
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, kind)(Lift))
    answer = agent.run_sync(QUESTION, model_settings=settings())
    assert isinstance(answer.output, Lift)


def test_a_conversation_with_a_tool(model: Any) -> None:
    """A forced tool is called, its result goes back, and the output tool ends the run."""
    agent = pydantic_ai.Agent(model, output_type=pydantic_ai.ToolOutput(Lift))
    called: list[str] = []

    @agent.tool_plain
    def weather(side: bool) -> str:
        """The weather on one side."""
        called.append(str(side))
        return "snow"

    limits = pydantic_ai.UsageLimits(request_limit=12)
    for seed in range(60):  # the Responses API has none: there every attempt is drawn anew
        try:
            answer = agent.run_sync(QUESTION, model_settings=settings(temperature=1, seed=seed), usage_limits=limits)
        except pydantic_ai.UsageLimitExceeded:
            continue
        assert isinstance(answer.output, Lift)
        if called:
            break
    assert called


def test_errors(model: Any) -> None:
    agent = pydantic_ai.Agent(model)
    with pytest.raises(pydantic_ai.exceptions.ModelHTTPError) as refused:
        agent.run_sync(QUESTION, model_settings=settings(temperature=-1))
    assert refused.value.status_code == 400
    assert refused.value.body["param"] == "temperature"
