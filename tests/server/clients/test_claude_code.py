"""Claude Code ends a turn that uses a tool. It is installed from npm into a cache folder outside the tree."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_model import tool_call, write_scripted_checkpoint
from tests.server.running_server import NAME, RunningServer, start_server
from tests.tools import npm_folder

pytestmark = pytest.mark.slow

VERSION = "2.1.197"
COMMAND = {"command": "echo lift-$((40 + 2))", "description": "Compute it"}
REPLIES = ["I shall look. " + tool_call("Bash", COMMAND), "Lift 42 it is, said Bash."]
SECONDS = 300


@pytest.fixture(scope="module")
def program() -> Path:
    # Without its optional packages it has no program for this machine.
    folder = npm_folder(f"claude-code-{VERSION}", ["install", f"@anthropic-ai/claude-code@{VERSION}"])
    (found,) = folder.glob("node_modules/@anthropic-ai/claude-code-*/claude")
    return found


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("claude")
    write_scripted_checkpoint(folder / "model", REPLIES)
    running = start_server(folder / "model", folder / "log", "--kv-memory", "64MiB")
    yield running
    assert running.stop() == 0, running.tail()


def run(program: Path, server: RunningServer, home: Path, **environment: str) -> list[dict[str, Any]]:
    """Return the program's messages."""
    (home / "work").mkdir(parents=True)
    own = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": NAME,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    command = [str(program), "-p", "Which lift is it?", "--output-format", "stream-json", "--verbose"]
    done = subprocess.run(
        [*command, "--allowedTools", "Bash"],
        cwd=home / "work",
        env=own | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:] + server.tail()
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "environment",
    [{}, {"ENABLE_TOOL_SEARCH": "true", "ENABLE_PROMPT_CACHING_1H": "1"}, {"MAX_THINKING_TOKENS": "0"}],
    ids=["as it is", "tool search", "no thinking"],
)
def test_a_turn_with_a_tool(
    program: Path, scripted: RunningServer, tmp_path: Path, environment: dict[str, str]
) -> None:
    messages = run(program, scripted, tmp_path / "home", **environment)
    blocks = [block for one in messages if one["type"] in ("assistant", "user") for block in one["message"]["content"]]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_result", "text"]
    assert blocks[1]["input"] == COMMAND
    assert blocks[2]["content"] == "lift-42"
    result = messages[-1]
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, REPLIES[1])
    assert result["usage"]["cache_read_input_tokens"] > 10_000  # of the second request
