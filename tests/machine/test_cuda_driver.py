"""Calls of the CUDA driver, with a fake of its library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from chairlift.machine import hardware
from chairlift.machine.hardware import count_gpus, create_context


class FakeDriver:
    """Two GPUs."""

    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.status = 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = 100 + index
        return 0 if index < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        self.contexts.append(device.value)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
    return fake


@pytest.mark.parametrize(("device", "created"), [("auto", 100), ("cuda", 100), ("cuda:1", 101)])
def test_the_context_of_the_configured_gpu_is_created(driver: FakeDriver, device: str, created: int) -> None:
    assert create_context(device)
    assert driver.contexts == [created]


@pytest.mark.parametrize("device", ["cpu", "cuda:2"])
def test_other_devices_have_none(driver: FakeDriver, device: str) -> None:
    assert not create_context(device)
    assert not driver.contexts


def test_a_driver_that_cannot_start_has_no_gpus(driver: FakeDriver) -> None:
    assert count_gpus() == 2
    driver.status = 100
    assert count_gpus() == 0
    assert not create_context("cuda")


def test_no_context_is_created_for_a_torch_without_cuda(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: False)
    assert not create_context("auto")
    assert not driver.contexts
