"""openai-agents: one turn with a tool, by chat completions and by the Responses API."""

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


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("agents")
    replies = [tool_call("get_weather", {"city": "Oslo"}), "It rains in Oslo."]
    running = start_server(
        write_scripted_checkpoint(folder / "model", replies, positions=8192), folder / "log", "--kv-memory", "16MiB"
    )
    yield running
    assert running.stop() == 0, running.tail()


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_turn_with_a_tool(scripted: RunningServer, tmp_path: Path, kind: str) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [PYTHON or sys.executable, str(program), f"{scripted.url}/v1", kind, NAME],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["called Oslo", "It rains in Oslo."]
