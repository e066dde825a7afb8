"""Calls of the CUDA driver that need no torch."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path


def count_gpus() -> int:
    """Return the number of visible CUDA devices; 0 without a driver."""
    driver = _initialized_driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def create_context(device: str) -> bool:
    """Create the context of `device` ("auto", "cuda" or "cuda:1") that torch will use in this process.

    False if it is no GPU, there is none here, or torch cannot use it. The driver's calls do not hold the interpreter's
    lock.
    """
    if (device != "auto" and not device.startswith("cuda")) or not _torch_has_cuda():
        return False
    driver = _initialized_driver()
    gpu, context = ctypes.c_int(0), ctypes.c_void_p(None)
    if driver is None or driver.cuDeviceGet(ctypes.byref(gpu), int(device.partition(":")[2] or 0)):
        return False
    return not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def _initialized_driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _torch_has_cuda() -> bool:
    """Whether the installed torch is built for CUDA, without importing it."""
    found = find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders or ())
