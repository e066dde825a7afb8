"""Kernels are compiled in parallel, and all of them for every supported GPU, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.kernels.triton import launch

PROGRAM = '''
import json, threading
from types import SimpleNamespace
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from chairlift.kernels.triton.compile import compile_kernels

launched, loaded = [], []

class Driver:
    """The driver of a Hopper GPU; records what is loaded and launched."""
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, *binary: loaded.append((name, threading.current_thread().name)) or (1, 2, 0, 0, 1024),
    )
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    launcher_cls = lambda self, source, metadata: lambda *how: launched.append(source.fn.__name__)

triton.runtime.driver.set_active(Driver())

@triton.jit
def _first_kernel(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 1.0)

@triton.jit
def _second_kernel(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 2.0)

@triton.jit
def _broken_kernel(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), nothing)

x = torch.zeros(64)

def step():
    for _ in range(2):  # like the layers of a model
        _first_kernel[(1,)](x, SIZE=16)
        _second_kernel[(1,)](x, SIZE=16)
        _second_kernel[(1,)](x, SIZE=32)

def walk():
    step()
    _broken_kernel[(1,)](x, SIZE=16)

compile_kernels(walk, torch.device("cpu"), launched=[_first_kernel])
before = list(launched), sorted(name for name, _ in loaded), sorted({name != "MainThread" for _, name in loaded})
compiled = len(loaded)
step()
try:
    _broken_kernel[(1,)](x, SIZE=16)
except Exception as error:
    said = str(error)
print(json.dumps([before, launched, len(loaded) - compiled, said]))
'''


def test_only_named_kernels_are_launched_and_none_is_compiled_twice(tmp_path: Path) -> None:
    """Runs in a process without Triton's interpreter."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(file)],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    (early, loaded, in_threads), launched, loaded_later, said = json.loads(run.stdout.splitlines()[-1])
    assert early == ["_first_kernel"] * 2
    assert loaded == ["_first_kernel", "_second_kernel", "_second_kernel"]
    assert True in in_threads
    assert launched == early + ["_first_kernel", "_second_kernel", "_second_kernel"] * 2
    assert loaded_later == 0
    assert "nothing is not defined" in said


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    """Compiling needs no GPU. FP8 caches and weights are left out before compute capability 8.9."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for", str(capability)],
        env=variables | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    compiled = set(json.loads(run.stdout.splitlines()[-1]))
    sources = [file.read_text() for file in Path(launch.__file__).parent.glob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert "decode_kernel" in kernels
    assert kernels - compiled == ({"_round_rows_kernel"} if capability == 80 else set())
