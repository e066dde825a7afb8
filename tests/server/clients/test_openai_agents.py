"""openai-agents: turns with a tool, by chat completions and by the Responses API, and with what the server keeps."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripted_model import tool_call, write_scripted_checkpoint
from tests.server.running_server import NAME, RunningServer, start_server

# It pins another version of the official client, so it may need a Python of its own.
PYTHON = os.environ.get("CHAIRLIFT_OPENAI_AGENTS_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON and importlib.util.find_spec("agents") is None,
        reason="openai-agents is not installed: pip install openai-agents, into the Python that "
        "CHAIRLIFT_OPENAI_AGENTS_PYTHON names",
    ),
]
PROGRAM = """
import sys
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

url, kind, name = sys.argv[1:]
set_tracing_disabled(True)

@function_tool
def get_weather(city: str) -> str:
    "The weather in a city."
    print("called", city)
    return "rain"

models = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
model = models[kind](model=name, openai_client=AsyncOpenAI(base_url=url, api_key="none"))
agent = Agent(name="Guide", instructions="Help.", tools=[get_weather], model=model)
print(Runner.run_sync(agent, "What is the weather in Oslo?").final_output)
"""

STORED = """
import asyncio, sys
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.memory import OpenAIConversationsSession
from openai import AsyncOpenAI

url, name = sys.argv[1:]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url, api_key="none")

@function_tool
def get_weather(city: str) -> str:
    "The weather in a city."
    return "rain"

model = OpenAIResponsesModel(model=name, openai_client=client)
agent = Agent(name="Guide", instructions="Help.", tools=[get_weather], model=model)

async def ask(question, **more):
    result = await Runner.run(agent, question, **more)
    print(result.final_output)
    return result

async def main():
    first = await ask("What is the weather in Oslo?", auto_previous_response_id=True)
    await ask("And now?", previous_response_id=first.last_response_id)
    session = OpenAIConversationsSession(openai_client=client)
    for question in ("What is the weather in Oslo?", "And now?"):
        await ask(question, session=session)
    print(*(item.get("role") or item["type"] for item in await session.get_items()))
    await session.pop_item()
    print(len(await session.get_items()))
    conversation = await client.conversations.create()
    await ask("What is the weather in Oslo?", conversation_id=conversation.id)
    print(len((await client.conversations.items.list(conversation.id)).data))
    await session.clear_session()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("agents")
    replies = [tool_call("get_weather", {"city": "Oslo"}), "It rains in Oslo."]
    model = write_scripted_checkpoint(folder / "model", replies, positions=8192)
    options = ["--kv-memory", "16MiB", "--responses-dir", str(folder / "stored")]
    running = start_server(model, folder / "log", *options)
    yield running
    assert running.stop() == 0, running.tail()


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_turn_with_a_tool(scripted: RunningServer, tmp_path: Path, kind: str) -> None:
    assert output(tmp_path, PROGRAM, f"{scripted.url}/v1", kind, NAME) == ["called Oslo", "It rains in Oslo."]


def test_turns_on_what_the_server_keeps(scripted: RunningServer, tmp_path: Path) -> None:
    answer = "It rains in Oslo."
    assert output(tmp_path, STORED, f"{scripted.url}/v1", NAME) == [
        *[answer] * 4,
        "user function_call function_call_output assistant user assistant",
        "5",
        answer,
        "4",
    ]


def output(folder: Path, program: str, *arguments: str) -> list[str]:
    """Run a program and return its lines."""
    file = folder / "agent.py"
    file.write_text(program)
    command = [PYTHON or sys.executable, str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
