"""The tests of one server, run against the ingress of a fleet with two replicas."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.cluster.running_fleet import RunningFleet, start_fleet
from tests.server import (
    test_bad_requests,
    test_bad_responses,
    test_forced_tools,
    test_messages,
    test_openai_client,
    test_response_tools,
    test_responses,
    test_searching,
    test_structured_output,
    test_tools,
)
from tests.server.sample_tools import TOOL_TEMPLATE
from tests.tiny import write_tiny_checkpoint

pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")
pytestmark = pytest.mark.slow

MODULES = (
    test_bad_requests,
    test_bad_responses,
    test_forced_tools,
    test_messages,
    test_openai_client,
    test_response_tools,
    test_responses,
    test_searching,
    test_structured_output,
    test_tools,
)
FIXTURES = {"server", "tool_server"}  # of which each test needs one


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("fleet") / "tiny")
    running = start_fleet(folder, folder.parent / "log")
    running.wait_for_replicas(2)
    yield running
    assert running.stop() == 0, running.tail()


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("tools") / "tiny"
    marks = ["<tool_call>", "</tool_call>"]
    write_tiny_checkpoint(folder, chat_template=TOOL_TEMPLATE, more_special=marks, positions=2048)
    running = start_fleet(folder, folder.parent / "log")
    running.wait_for_replicas(2)
    yield running
    assert running.stop() == 0, running.tail()


def _tests(module: ModuleType) -> Iterator[tuple[str, object]]:
    """The tests of a module that need one of our servers and no other fixture."""
    for name, found in vars(module).items():
        if not name.startswith("test_") or not inspect.isfunction(found):
            continue
        marks = getattr(found, "pytestmark", [])
        given = {one for mark in marks if mark.name == "parametrize" for one in _names(mark.args[0])}
        if FIXTURES & (needed := set(inspect.signature(found).parameters)) and not needed - FIXTURES - given:
            yield f"{module.__name__.rsplit('.', 1)[1]}__{name.removeprefix('test_')}", found


def _names(argument: str | list[str]) -> list[str]:
    return [one.strip() for one in argument.split(",")] if isinstance(argument, str) else list(argument)


for _module in MODULES:
    globals().update(_tests(_module))
