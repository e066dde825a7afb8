"""Where the kernels for Hopper can run. They are written in Gluon, which differs between versions of Triton."""

from __future__ import annotations

from functools import cache

import torch
import triton

from chairlift.kernels.gpu import gpu_of

HOPPER = (9, 0)
TESTED_TRITON = ("3.6.",)  # versions that the kernels ran with on a GPU
ASSUMED_MULTIPROCESSORS = 132  # An H200 has this many, which counts when kernels are compiled without a GPU.


def hopper_obstacle(device: torch.device) -> str | None:
    """Why kernels for Hopper cannot run on a device; None if they can. Modules that import Gluon are imported then."""
    gpu = gpu_of(device)
    if gpu is None or gpu.capability != HOPPER:
        return "it runs on GPUs of compute capability 9.0"
    if not triton.__version__.startswith(TESTED_TRITON):
        return f"it was tested with Triton {TESTED_TRITON[-1]}x, not {triton.__version__}"
    return None


@cache
def num_multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU."""
    if device.type != "cuda":
        return ASSUMED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
