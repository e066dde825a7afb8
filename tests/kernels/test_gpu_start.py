"""What is started beside the reading of the weights."""

from __future__ import annotations

import threading

import pytest
import torch

from chairlift.kernels import gpu
from chairlift.kernels.gpu import GPUStart, start_libraries


def test_a_gpu_is_waited_for_and_failures_are_left_to_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done = threading.Event(), list[object]()

    def multiply(*given: object) -> None:
        begun.wait(60)
        done.append(given)

    def fail(device: torch.device) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(gpu, "_start_cublas", multiply)
    monkeypatch.setattr(gpu, "_hash_triton", fail)
    device = torch.device("cuda")
    start = GPUStart(device, torch.bfloat16)
    assert not done, "it runs beside what follows"
    begun.set()
    start.wait()
    assert done == [(device, torch.bfloat16)]


def test_a_cpu_has_nothing_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(gpu, "_attempt", started.append)
    GPUStart(torch.device("cpu"), torch.float32).wait()
    assert not started


def test_tritons_key_is_computed_for_the_present_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached results are those that kernels of that architecture ask for."""
    cache, compiler = pytest.importorskip("triton.runtime.cache"), pytest.importorskip("triton.compiler.compiler")
    hashed: list[int] = []

    class Backend:
        def __init__(self, target: object) -> None:
            self.target = target

        def hash(self) -> None:
            hashed.append(self.target.arch)  # type: ignore[attr-defined]

    monkeypatch.setattr(cache, "triton_key", lambda: hashed.append(0))
    monkeypatch.setattr(compiler, "make_backend", Backend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu._hash_triton(torch.device("cuda"))
    assert hashed == [0, 90]


def test_a_later_start_of_the_same_libraries_finds_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process starts them before the engine does."""
    monkeypatch.setattr(gpu, "_attempt", lambda part: None)
    start_libraries.cache_clear()
    first = start_libraries(torch.device("cuda"), torch.bfloat16)
    assert start_libraries(torch.device("cuda"), torch.bfloat16) is first
    assert start_libraries(torch.device("cuda", 1), torch.bfloat16) is not first
    start_libraries.cache_clear()
