"""The scripted model of tests/scripted_model.py plays its replies through a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.scripted_model import tool_call, write_scripted_checkpoint
from tests.server.running_server import NAME, start_server
from tests.server.sample_tools import CLOCK, MESSAGES, WEATHER

ARGUMENTS = {"city": "Oslo", "days": 3}


def test_it_calls_a_tool_and_then_answers(tmp_path: Path) -> None:
    replies = ["Let me look. " + tool_call("get_weather", ARGUMENTS), "It rains, as it did before."]
    folder = write_scripted_checkpoint(tmp_path / "model", replies)
    running = start_server(folder, tmp_path / "log", "--kv-memory", "64MiB")
    try:
        assert running.get("/v1/models").json()["data"][0]["max_model_len"] == 131_072
        client = running.client()
        shared: dict[str, Any] = {"model": NAME, "tools": [WEATHER, CLOCK]}
        first = client.chat.completions.create(messages=MESSAGES, **shared).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content == "Let me look."
        (call,) = first.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo", "days": 3}')
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain " * 20_000}
        messages = [*MESSAGES, first.message.model_dump(exclude_none=True), result]
        second = client.chat.completions.create(messages=messages, **shared)
        assert second.choices[0].message.content == replies[1]
        assert second.usage.prompt_tokens > 20_000
    finally:
        assert running.stop() == 0, running.tail()
