"""Kernels run on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when it is first imported

pytest.importorskip("triton", reason="the GPU kernels need triton; `make install` brings it")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def right_rounding() -> None:
    """Round to e4m3 as the chip does: Triton 3.6's interpreter loses carries to the next power of two."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != tl.float8e4nv or source not in (tl.float32, tl.float16):
            return convert(values, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp(-448.0, 448.0)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = rounded
