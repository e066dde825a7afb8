"""Checks the configured device without importing torch, before the engine process is started."""

from __future__ import annotations

from chairlift.errors import InvalidParameter
from chairlift.machine.cuda_driver import count_gpus


def check_device(device: str) -> None:
    """Raise if `device` is a GPU that this machine does not have."""
    if not device.startswith("cuda"):
        return
    count, index = count_gpus(), int(device.partition(":")[2] or 0)
    if not count:
        raise InvalidParameter("device", "there is no CUDA device here; choose cpu")
    if index >= count:
        raise InvalidParameter("device", f"{device} does not exist; there are {count} CUDA devices, from cuda:0")
