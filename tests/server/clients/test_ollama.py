"""Ollama's official Python client, and the program `llm` with its plugin for Ollama."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.clients.scenario import LIFT_TOOL, MESSAGES, QUESTION, Lift
from tests.server.running_server import NAME, RunningServer, start_server
from tests.tiny import write_tiny_checkpoint
from tests.tools import missing

pytestmark = pytest.mark.slow
ollama = pytest.importorskip("ollama", reason="ollama is not installed: pip install -e '.[clients]'")

OPTIONS = {"num_predict": 12, "temperature": 0}


@pytest.fixture
def client(tool_server: RunningServer) -> Iterator[Any]:
    with ollama.Client(host=tool_server.url) as opened:
        yield opened


def test_chat(client: Any, expected: str) -> None:
    answer = client.chat(model=NAME, messages=MESSAGES, options=OPTIONS)
    assert answer.message.content == expected
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 12)
    parts = list(client.chat(model=f"{NAME}:latest", messages=MESSAGES, options=OPTIONS, stream=True, keep_alive="5m"))
    assert "".join(part.message.content for part in parts) == expected
    assert parts[-1].eval_duration > 0


def test_chat_without_blocking(tool_server: RunningServer, expected: str) -> None:
    async def ask() -> str:
        async with ollama.AsyncClient(host=tool_server.url) as opened:
            stream = await opened.chat(model=NAME, messages=MESSAGES, options=OPTIONS, stream=True)
            return "".join([part.message.content async for part in stream])

    assert asyncio.run(ask()) == expected


def test_generate(client: Any) -> None:
    first = client.generate(model=NAME, prompt=QUESTION, options=OPTIONS)
    assert first.response
    again = client.generate(model=NAME, prompt=QUESTION, options=OPTIONS, context=first.context)
    assert again.prompt_eval_count > first.prompt_eval_count
    parts = list(client.generate(model=NAME, prompt=QUESTION, options=OPTIONS, raw=True, stream=True))
    assert parts[-1].done
    assert parts[-1].context is None
    assert client.generate(model=NAME).done_reason == "load"


def test_structured_output(client: Any) -> None:
    answer = client.chat(model=NAME, messages=MESSAGES, format=Lift.model_json_schema(), options={"temperature": 0})
    Lift.model_validate_json(answer.message.content)


def test_tools(client: Any) -> None:
    """A random model calls no tool by choice; the definition and the history of a call are taken as they are sent."""

    def lift(side: str) -> str:
        """Say whether a lift runs.

        Args:
          side: The side of the mountain.
        """
        return side

    call = {"function": {"name": "Lift", "arguments": {"open": True, "side": "north"}}}
    history = [
        *MESSAGES,
        ollama.Message(role="assistant", tool_calls=[call]),
        {"role": "tool", "tool_name": "Lift", "content": "It runs."},
    ]
    answer = client.chat(model=NAME, messages=history, tools=[LIFT_TOOL, lift], options=OPTIONS)
    assert answer.prompt_eval_count > 100


def test_models(client: Any) -> None:
    (listed,) = client.list().models
    assert listed.model == f"{NAME}:latest"
    assert client.ps().models[0].context_length == 2048
    shown = client.show(listed.model)
    assert "tools" in shown.capabilities
    assert shown.modelinfo["llama.context_length"] == 2048
    assert client.pull(NAME).status == "success"
    assert [one.status for one in client.pull(NAME, stream=True)] == ["success"]


def test_embeddings(client: Any) -> None:
    found = client.embed(model=NAME, input=["a lift", "a slope"], dimensions=8)
    assert [len(one) for one in found.embeddings] == [8, 8]
    assert len(client.embeddings(model=NAME, prompt="a lift").embedding) == 64


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as refused:
        client.chat(model="other", messages=MESSAGES)
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat"):
        next(client.chat(model=NAME, messages=MESSAGES, options={"mirostat": 2}, stream=True))
    with pytest.raises(ollama.ResponseError, match="one model"):
        client.delete(NAME)
    with pytest.raises(ollama.ResponseError, match="images"):
        client.generate(model=NAME, prompt="a", images=[b"x"])


def test_a_key_is_sent(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    running = start_server(folder, tmp_path / "log", "--api-key", "a-key-of-this-test")
    try:
        with pytest.raises(ollama.ResponseError, match="API key"):
            ollama.Client(host=running.url).list()
        with ollama.Client(host=running.url, headers={"Authorization": "Bearer a-key-of-this-test"}) as opened:
            assert opened.list().models
    finally:
        assert running.stop() == 0, running.tail()


def llm(server: RunningServer, folder: Path, *arguments: str) -> str:
    pytest.importorskip("llm_ollama", reason="llm-ollama is not installed: pip install -e '.[clients]'")
    environment = os.environ | {"OLLAMA_HOST": server.url, "LLM_USER_PATH": str(folder)}
    program = Path(sys.executable).with_name("llm")
    if not program.exists():
        missing("llm is not installed: make test-all installs it")
    done = subprocess.run([str(program), *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_llm_with_its_plugin(tool_server: RunningServer, tmp_path: Path, expected: str) -> None:
    name = f"ollama/{NAME}:latest"
    assert name in llm(tool_server, tmp_path, "models")
    limits = ("-o", "num_predict", "12", "-o", "temperature", "0")
    for more in ((), ("--no-stream",)):
        assert llm(tool_server, tmp_path, "-m", name, *limits, *more, QUESTION).strip() == expected.strip()
    schema = '{"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"], '
    schema += '"additionalProperties": false}'
    answer = llm(tool_server, tmp_path, "-m", name, "--schema", schema, "-o", "temperature", "0", QUESTION)
    assert json.loads(answer).keys() == {"open"}
