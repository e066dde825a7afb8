"""Fixtures: real servers on real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running_server import RunningServer, start_server
from tests.server.sample_tools import THINKING_TEMPLATE, TOOL_TEMPLATE
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    files = tmp_path_factory.mktemp("server_files")
    running = start_server(tiny_folder, tmp_path_factory.mktemp("server") / "log", "--files-dir", str(files))
    yield running
    assert running.stop() == 0, running.tail()


@pytest.fixture(scope="session")
def stored_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that keeps responses, conversations and files."""
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("stored", "stored_files")]
    log = tmp_path_factory.mktemp("stored_server") / "log"
    running = start_server(tiny_folder, log, "--responses-dir", folders[0], "--files-dir", folders[1])
    yield running
    assert running.stop() == 0, running.tail()


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a chat template that shows tools and with special tokens as tool-call markers."""
    marks = ["<tool_call>", "</tool_call>"]
    folder = tmp_path_factory.mktemp("tools") / "tiny"
    write_tiny_checkpoint(folder, chat_template=TOOL_TEMPLATE, more_special=marks, positions=2048)
    running = start_server(folder, tmp_path_factory.mktemp("tool_server") / "log")
    yield running
    assert running.stop() == 0, running.tail()


@pytest.fixture(scope="session")
def described_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a chat template that does not show tools, and with enough context to describe them."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("described") / "tiny", positions=4096)
    running = start_server(folder, tmp_path_factory.mktemp("described_server") / "log")
    yield running
    assert running.stop() == 0, running.tail()


@pytest.fixture(scope="session")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose chat template has reasoning, which it can begin or leave out, and shows tools."""
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    folder = tmp_path_factory.mktemp("thinking") / "tiny"
    write_tiny_checkpoint(folder, chat_template=THINKING_TEMPLATE, more_special=marks, positions=2048)
    running = start_server(folder, tmp_path_factory.mktemp("thinking_server") / "log")
    yield running
    assert running.stop() == 0, running.tail()
