"""Fixtures: a real browser and a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser import start_browser
from tests.dashboard.pages import Page
from tests.server.conftest import tiny_folder  # noqa: F401 (a fixture)
from tests.server.running_server import RunningServer, start_server
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    driver = start_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def lift_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with six slots, so that a burst has to wait."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("lift") / "tiny", positions=1024)
    options = ("--max-batch-requests", "6", "--max-batch-tokens", "64")
    running = start_server(folder, tmp_path_factory.mktemp("lift_server") / "log", *options)
    yield running
    assert running.stop() == 0, running.tail()


@pytest.fixture
def page(browser: Any, lift_server: RunningServer) -> Iterator[Page]:
    browser.set_window_size(1440, 1000)
    opened = Page(browser)
    opened.open(f"{lift_server.url}/dashboard")
    opened.wait_for("return document.documentElement.dataset.state === 'live' && chairlift.model.key !== null")
    yield opened
    assert opened.problems() == []


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path
