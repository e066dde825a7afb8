"""Kernels are found without launching them and compiled by other processes, without a GPU."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.kernels import triton as kernels
from chairlift.kernels.triton import launch

KERNELS = """
import triton, triton.language as tl

@triton.jit
def first_kernel(x_ptr, SIZE: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), tl.full([SIZE], SCALE, KIND).to(tl.float32))

WIDE = tl.constexpr(32)

@triton.jit
def second_kernel(x_ptr, count, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 2.0, mask=tl.arange(0, SIZE) < count)

@triton.jit
def broken_kernel(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), nothing)
"""

PROGRAM = """
import json, logging, threading
from types import SimpleNamespace
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from chairlift.kernels.compilation.pool import KernelCompiler
from chairlift.kernels.compilation.spec import KernelRecorder
from chairlift.kernels.compilation.pool import libcuda_stub
from made_kernels import WIDE, broken_kernel, first_kernel, second_kernel

launched, loaded, compiled = [], [], []

class Driver:
    '''The driver of a Hopper GPU; records what is loaded and launched.'''
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, *binary: loaded.append(name) or (1, 2, 0, 0, 1024),
    )
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    launcher_cls = lambda self, source, metadata: lambda *how: launched.append(source.fn.__name__)

triton.runtime.driver.set_active(Driver())
x = torch.zeros(64)

def step():
    for _ in range(2):  # like the layers of a model
        first_kernel[(1,)](x, SIZE=16, SCALE=0.0, KIND=tl.float16, num_warps=2)
        second_kernel[(1,)](x, 64, SIZE=16)
        second_kernel[(1,)](x[1:], 65, SIZE=WIDE)  # neither aligned nor a multiple of 16

def walk():
    step()
    broken_kernel[(1,)](x, SIZE=16)

specs = KernelRecorder(90).record(walk, launched=[first_kernel])
early, names, before = list(launched), [spec.name for spec in specs], [spec.is_cached() for spec in specs]
with libcuda_stub() as libraries:
    compiler = KernelCompiler(libraries)
    ready_before = compiler.has_compiled(specs)
    compiler.wait(specs)
after = [spec.is_cached() for spec in specs]
triton.knobs.compilation.listener = lambda *, cache_hit, **rest: compiled.append(not cache_hit)
launched.clear(), loaded.clear()
step()
again = KernelCompiler()
again.request(specs[:3])
print(json.dumps({
    "early": early, "names": names, "before": before, "ready_before": ready_before, "after": after,
    "count": compiler.num_compiled, "ready": compiler.has_compiled(specs), "launched": launched, "loaded": loaded,
    "compiled": compiled, "again": again.has_compiled(specs[:3]) and again._process is None,
}))
"""


def without_interpreter(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that compiles kernels instead of interpreting them, into an empty cache."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return variables | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}


def test_recorded_kernels_are_compiled_by_other_processes_as_a_launch_would(tmp_path: Path) -> None:
    (tmp_path / "made_kernels.py").write_text(KERNELS)
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    env = without_interpreter(tmp_path)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    run = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["names"] == ["first_kernel", "second_kernel", "second_kernel", "broken_kernel"]
    assert found["early"] == ["first_kernel"] * 2, "only named kernels are launched"
    assert found["before"] == [True, False, False, False], "one was compiled by its launch"
    assert not found["ready_before"]
    assert found["after"] == [True, True, True, False]
    assert found["count"] == 2
    assert found["ready"], "a kernel that cannot be compiled does not block those that can"
    assert found["launched"] == ["first_kernel", "second_kernel", "second_kernel"] * 2
    assert found["loaded"] == ["second_kernel"] * 2
    assert found["compiled"] == [False, False], "the launches find the binaries in the cache"
    assert found["again"], "no process is started for what is in the cache"
    assert list((tmp_path / "cache").glob("*/__triton_launcher*.so")), "what launches the kernels is built as well"


def test_the_compiling_process_does_without_torch(tmp_path: Path) -> None:
    modules = [module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    assert f"{kernels.__name__}.products.kernel" in modules
    program = (
        "import sys\nsys.argv = ['', '1']\n"
        "from chairlift.kernels.compilation import __main__ as start\n"
        "from chairlift.kernels.compilation.__main__ import _NoTorch\n"
        "sys.modules['torch'] = _NoTorch('torch')\n"
        f"import importlib\n[importlib.import_module(name) for name in {modules!r}]\n"
        "assert not hasattr(sys.modules['torch'], '__version__')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env=without_interpreter(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("variants", ["brief", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", [*(pytest.param(each, marks=pytest.mark.slow) for each in (80, 89)), 90])
def test_every_kernel_compiles(capability: int, variants: str, tmp_path: Path) -> None:
    """Compiling needs no GPU. FP8 caches and weights are left out before compute capability 8.9."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for", str(capability), variants],
        env=without_interpreter(tmp_path),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    compiled = set(json.loads(run.stdout.splitlines()[-1]))
    sources = [file.read_text() for file in Path(launch.__file__).parent.rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert "decode_kernel" in kernels
    left_out = {"hopper_decode_kernel", "_join_parts_kernel", "hopper_prefill_kernel"} if capability < 90 else set()
    assert kernels - compiled == left_out | ({"_round_rows_kernel", "vector_kernel"} if capability == 80 else set())
