"""Codex CLI ends turns that use a tool. It is installed from npm into a cache folder outside the tree."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.scripted_model import tool_call, write_scripted_checkpoint
from tests.server.running_server import NAME, start_server
from tests.tools import npm_folder

pytestmark = pytest.mark.slow

VERSION = "0.169.0"
ANSWER = "All done: the file says what it should."
COMMAND = "echo lift-$((40 + 2)) > new.txt; cat new.txt"
PATCH = "*** Begin Patch\n*** Add File: new.txt\n+lift-42\n*** End Patch\n"
SCRIPT = f"const r = await tools.exec_command({{cmd: '{COMMAND}'}}); text(r);"
# Models of these names get other tools: custom ones with a grammar, and such in an item of the input.
CASES = {
    NAME: tool_call("exec_command", {"cmd": COMMAND}),
    "gpt-5.5": tool_call("apply_patch", {"input": PATCH}),
    "gpt-5.6-sol": tool_call("exec", {"input": SCRIPT}),
}


@pytest.fixture(scope="module")
def program() -> Path:
    folder = npm_folder(f"codex-{VERSION}", ["install", f"@openai/codex@{VERSION}"])
    return folder / "node_modules" / ".bin" / "codex"


@pytest.mark.parametrize("model", CASES)
def test_a_turn_with_a_tool(program: Path, tmp_path: Path, model: str) -> None:
    write_scripted_checkpoint(tmp_path / "model", ["I shall look. " + CASES[model], ANSWER])
    aliases = [] if model == NAME else ["--served-model-name", model]
    server = start_server(tmp_path / "model", tmp_path / "log", "--kv-memory", "64MiB", *aliases)
    try:
        home, work = tmp_path / "home", tmp_path / "work"
        home.mkdir()
        work.mkdir()
        provider = f'name = "chairlift"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
        config = f'model = "{model}"\nmodel_provider = "chairlift"\nmodel_context_window = 131072\n'
        (home / "config.toml").write_text(f"{config}[model_providers.chairlift]\n{provider}")
        done = subprocess.run(
            [
                *(str(program), "exec", "--json", "--skip-git-repo-check"),
                *("--dangerously-bypass-approvals-and-sandbox", "make the file"),
            ],
            cwd=work,
            env={"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:] + server.tail()
    finally:
        assert server.stop() == 0, server.tail()
    events = [json.loads(line) for line in done.stdout.splitlines()]
    messages = [one["item"]["text"] for one in events if one.get("item", {}).get("type") == "agent_message"]
    assert messages == ["I shall look.", ANSWER]
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["cached_input_tokens"] > 10_000  # of the second request
    assert (work / "new.txt").read_text() == "lift-42\n"
