"""Launch options and sizes shared by all kernels.

On Hopper and later, a kernel may start while the previous one still runs (programmatic dependent launch). A kernel
waits for its predecessor where it first needs its results, and right after that lets its successor start. This hides
most of the one or two microseconds between kernels, of which a decode step has hundreds. Before its wait, a kernel may
only read what was written before its predecessor started: weights, block tables (written by the first kernel of a
step), and keys and values of earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from chairlift.kernels.gpu import gpu_of, on_gpu


@triton.jit
def prefetch_rows(rows, num_bytes):
    """Prefetch the first bytes of each row (a tensor of pointers) into L2, on Hopper and later."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [rows.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def parts_of_rows(parts_ptr, m, M, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Load [M, PARTS] numbers about parts of rows, zero outside."""
    part = tl.arange(0, PADDED)
    inside = (m < M)[:, None] & (part < PARTS)[None, :]
    return tl.load(parts_ptr + m[:, None] * PARTS + part[None, :], mask=inside, other=0.0)


@triton.constexpr_function
def num_halvings(size):
    """The logarithm of a power of two."""
    return size.bit_length() - 1


@triton.jit
def pairwise_sum(x):
    """Sum the rows of x [M, a power of two], neighbours first: no layout of registers changes the order, and parts of
    a row that are powers of two are summed up by the same additions alone as within the row."""
    for _ in tl.static_range(num_halvings(x.shape[1])):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])


def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options, with the `OVERLAP` argument of every kernel."""
    gpu = gpu_of(device)
    return {"OVERLAP": True, "launch_pdl": True} if gpu and gpu.capability >= (9, 0) else {"OVERLAP": False}


def row_options(size: int, device: torch.device, most_warps: int = 16) -> dict[str, Any]:
    """Launch options of a kernel with one program per row of `size` numbers."""
    block = next_power_of_2(size)
    return {"BLOCK": block, "num_warps": max(1, min(most_warps, block // 512)), **overlapping(device)}


def shared_memory(device: torch.device) -> int:
    """Shared memory of one program in bytes; unlimited in the interpreter."""
    gpu = gpu_of(device)
    return 2**30 if gpu is None else gpu.shared_memory


def reads_ahead(device: torch.device) -> bool:
    """Whether tiles are copied by the tensor memory accelerator: on Hopper and later, and in the interpreter."""
    gpu = gpu_of(device)
    return gpu is None or gpu.capability >= (9, 0)


@cache
def has_asm(device: torch.device) -> bool:
    """Whether kernels can contain PTX."""
    return on_gpu(device) and torch.version.hip is None


def split_scratch(size: int, programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the parts of split sums, and counters that are zero between launches.

    Shared by all kernels of one stream, which run in sequence: kernels use it after their wait only. Sizes are rounded
    up to powers of two: it is never freed, since captured steps keep it, so that few sizes have to serve all."""
    return _split_scratch(next_power_of_2(size), next_power_of_2(programs), device)


@cache
def _split_scratch(size: int, programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(size, device=device), torch.zeros(programs, dtype=torch.int32, device=device)


_generic_steps = 0  # contexts of `generic_kernels` that are entered


@contextmanager
def generic_kernels() -> Iterator[None]:
    """Compute with the few kernels that serve every number of rows, instead of the fastest for each.

    They are compiled before the engine is ready, so that no step has to wait until its own kernels are.
    """
    global _generic_steps
    _generic_steps += 1
    try:
        yield
    finally:
        _generic_steps -= 1


def tuned() -> bool:
    """Whether kernels may be chosen by the number of rows and the length of contexts."""
    return not _generic_steps


# Triton has both, but a call takes microseconds, and a step makes hundreds of calls.


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def last_power_of_2(number: int) -> int:
    """The largest power of two that is not above `number`, or 1."""
    return 1 << max(0, number.bit_length() - 1)


def spare_rows(rows: int) -> int:
    """Allocated rows of a tensor of `rows` rows."""
    if rows <= 16:
        return 16
    return 64 if rows <= 64 else cdiv(rows, 128) * 128


def empty_rows(rows: int, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor [rows, *size] with spare rows behind it, so that tiles of the product that reads it are inside.

    The tensor memory accelerator takes up to 1.5 times as long for a tile that is partly outside of its tensor."""
    return torch.empty(spare_rows(rows), *size, dtype=dtype, device=device)[:rows]


def described_rows(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe x with the spare rows its last tile [rows, columns] covers; their results are dropped."""
    count, depth = x.shape
    room = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // depth
    return TensorDescriptor(x, [min(room, cdiv(count, rows) * rows), depth], [depth, 1], [rows, columns])


def picked_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Copy some rows of `x` into a tensor with spare rows."""
    return torch.index_select(x, 0, rows, out=empty_rows(len(rows), *x.shape[1:], dtype=x.dtype, device=x.device))


class Tiling(NamedTuple):
    """The tile of one program of a matrix product."""

    rows: int
    columns: int
    depth: int  # elements of the sum per iteration
    stages: int
    parts: int = 1  # splits of the sum


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
