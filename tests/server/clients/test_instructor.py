"""instructor: validated objects by each of its modes."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.clients.scenario import MESSAGES, Lift
from tests.server.running_server import NAME, RunningServer

pytestmark = pytest.mark.slow
instructor = pytest.importorskip("instructor", reason="instructor is not installed: pip install -e '.[clients]'")

MODES = ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"]
CALL: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_retries": 1}


@pytest.mark.parametrize("mode", MODES)
def test_an_object(tool_server: RunningServer, mode: str) -> None:
    client = instructor.from_openai(tool_server.client(), mode=instructor.Mode[mode])
    found, raw = client.create_with_completion(response_model=Lift, **CALL)
    assert isinstance(found, Lift)
    assert raw.usage.total_tokens > 0


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_partial_object_is_streamed(tool_server: RunningServer, mode: str) -> None:
    client = instructor.from_openai(tool_server.client(), mode=instructor.Mode[mode])
    states = list(client.create_partial(response_model=Lift, **CALL))
    assert len(states) > 1
    assert states[-1].side in ("north", "south")
    assert isinstance(states[-1].open, bool)


def test_parallel_calls_of_the_asynchronous_client(tool_server: RunningServer) -> None:
    async def objects() -> list[Any]:
        official = openai.AsyncOpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)
        client = instructor.from_openai(official, mode=instructor.Mode.TOOLS)
        return await asyncio.gather(*(client.create(response_model=Lift, **CALL) for _ in range(4)))

    found = asyncio.run(objects())
    assert [each.model_dump() for each in found] == [found[0].model_dump()] * 4
    assert isinstance(found[0], Lift)


def test_a_failed_validation_is_sent_back(tool_server: RunningServer) -> None:
    """The retry's conversation has the failed call and the error as its tool result."""
    from pydantic import field_validator

    tried: list[bool] = []

    class Second(Lift):
        @field_validator("open")
        @classmethod
        def fails_once(cls, value: bool) -> bool:
            tried.append(value)
            if len(tried) == 1:
                raise ValueError("look again")
            return value

    client = instructor.from_openai(tool_server.client(), mode=instructor.Mode.TOOLS)
    assert isinstance(client.create(response_model=Second, **{**CALL, "max_retries": 2}), Second)
    assert len(tried) >= 2


def test_errors(tool_server: RunningServer) -> None:
    client = instructor.from_openai(tool_server.client(), mode=instructor.Mode.TOOLS)
    with pytest.raises(Exception, match="temperature"):
        client.create(response_model=Lift, **{**CALL, "temperature": -1})
