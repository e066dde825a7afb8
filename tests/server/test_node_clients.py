"""JavaScript clients on Node: the official one and the AI SDK.

Their packages are installed once, as node/package-lock.json has them, into a cache folder outside the tree.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.server.running_server import NAME, RunningServer
from tests.tools import npm_folder

HERE = Path(__file__).parent / "node"
QUESTION = "when does the lift stop?"


def installed() -> Path:
    """A folder with the installed packages, named by the hash of the lock file."""
    files = [HERE / "package.json", HERE / "package-lock.json"]
    return npm_folder(f"node-{hashlib.sha256(files[1].read_bytes()).hexdigest()[:16]}", ["ci"], files)


@pytest.fixture(scope="module")
def found(tool_server: RunningServer) -> dict[str, Any]:
    """The results of all scenarios of clients.mjs."""
    folder = installed()
    # Beside the packages, where Node finds them; with a unique name, for concurrent runs.
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".mjs") as script:
        script.write((HERE / "clients.mjs").read_bytes())
        script.flush()
        command = ["node", script.name, tool_server.url, NAME]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    scenarios: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return scenarios


@pytest.fixture(scope="module")
def expected(tool_server: RunningServer) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    answer = tool_server.client().chat.completions.create(model=NAME, messages=messages, max_tokens=12, temperature=0)
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("scenario", ["officialChat", "officialResponse", "compatibleText", "responsesText"])
def test_text_responses(found: dict[str, Any], expected: str, scenario: str) -> None:
    assert found[scenario].get("text") == expected, found[scenario]
    assert found[scenario]["tokens"] == 12


@pytest.mark.parametrize(
    "scenario", ["officialChatStream", "officialResponseStream", "compatibleTextStream", "responsesTextStream"]
)
def test_streamed_text(found: dict[str, Any], expected: str, scenario: str) -> None:
    assert found[scenario].get("text") == expected, found[scenario]
    assert found[scenario]["tokens"] == 12
    assert found[scenario].get("final", expected) == expected


def test_finish_reasons(found: dict[str, Any]) -> None:
    for scenario in ("compatibleText", "responsesText", "compatibleTextStream", "responsesTextStream"):
        assert found[scenario]["finishReason"] == "length"


def test_both_ways_to_continue_a_conversation_agree(found: dict[str, Any]) -> None:
    assert found["compatibleTurns"]["text"], found["compatibleTurns"]
    assert found["responsesTurns"] == found["compatibleTurns"]


def is_lift(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"open"} and isinstance(value["open"], bool)


def test_structured_objects(found: dict[str, Any]) -> None:
    made = [found["officialParsed"].get("chat"), found["officialParsed"].get("response")]
    for scenario in ("compatibleObject", "compatibleObjectStream", "responsesObject", "responsesObjectStream"):
        assert is_lift(found[scenario].get("object")), found[scenario]
        made.append(found[scenario]["object"])
    assert all(map(is_lift, made)), made
    assert made[0] == made[1]
    for provider in ("compatible", "responses"):
        assert found[f"{provider}Object"]["object"] == found[f"{provider}ObjectStream"]["object"]
        assert found[f"{provider}ObjectStream"]["pieces"] > 1


def test_tools_of_the_official_client(found: dict[str, Any]) -> None:
    assert found["officialTools"].get("name") == "lift", found["officialTools"]
    assert is_lift(found["officialTools"]["input"])
    assert found["officialTools"]["text"]


@pytest.mark.parametrize(
    "scenario", ["compatibleTools", "compatibleToolsStream", "responsesTools", "responsesToolsStream"]
)
def test_tools_of_the_ai_sdk(found: dict[str, Any], scenario: str) -> None:
    result = found[scenario]
    assert len(result.get("calls", [])) == 2, result
    for calls, results, reason in zip(result["calls"], result["results"], result["finishReasons"], strict=True):
        assert calls
        assert all(map(is_lift, calls))
        assert results == [{"heard": call["open"]} for call in calls]
        assert reason == "tool-calls"
    first, second = result["inputTokens"]
    assert second > first
    assert result.get("inputDeltas", 2) > 1


def test_errors_name_their_parameter(found: dict[str, Any]) -> None:
    refused = {"status": 400, "param": "previous_response_id", "type": "invalid_request_error"}
    assert found["officialRefusal"] == refused
