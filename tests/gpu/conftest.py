"""Tests that need a GPU are skipped without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.table import show

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for tests/kernels: Triton reads it when it is first imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # `item.keywords` has the name of this folder too
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figures recorded by tests of all worker processes."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    for line in show([property for report in reports for property in getattr(report, "user_properties", [])]):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Compute float32 products in float32, without TF32, in the engine and in transformers."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def default_model_file() -> Path:
    """The cached file of the default model; the test is skipped without it."""
    from chairlift.loading.known_models import DEFAULT_MODEL, WheelModel, known_model

    known = known_model(DEFAULT_MODEL)
    assert isinstance(known, WheelModel)
    if not known.cached:
        pytest.skip(f"{known.path.name} is not in {known.path.parent}")
    return known.path
