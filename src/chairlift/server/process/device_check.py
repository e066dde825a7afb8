"""Checks the configured device without importing torch, before the engine process is started."""

from __future__ import annotations

import ctypes

from chairlift.errors import InvalidParameter


def check_device(device: str) -> None:
    """Raise if `device` is a GPU that this machine does not have."""
    if not device.startswith("cuda"):
        return
    count, index = count_gpus(), int(device.partition(":")[2] or 0)
    if not count:
        raise InvalidParameter("device", "there is no CUDA device here; choose cpu")
    if index >= count:
        raise InvalidParameter("device", f"{device} does not exist; there are {count} CUDA devices, from cuda:0")


def count_gpus() -> int:
    """Return the number of visible CUDA devices; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
