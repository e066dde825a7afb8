"""Compiles the kernels of a step in parallel.

Triton compiles a kernel and its launcher at the first launch, half a second each, and a first step has about twenty of
them in sequence. Here a step runs without launching anything, and all missing kernels are compiled by as many threads
as there are processors: most of the time is spent in ptxas, the C compiler and LLVM, outside the GIL.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

log = logging.getLogger("chairlift")

MOST_THREADS = 16
_one_at_a_time = threading.Lock()


def compile_kernels(walk: Callable[[], None], device: torch.device, *, launched: Sequence[object] = ()) -> None:
    """Compile the kernels that `walk` would launch. Only those in `launched` run; the others write nothing, so `walk`
    must not depend on their results. Launches of other threads are not affected.

    Errors are ignored here: they show again, with better context, at the launch.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # added in Triton 3.5
        return
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with _one_at_a_time, ThreadPoolExecutor(threads, initializer=_initializer(device)) as pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)
        try:
            with _not_launching(launched), mode:
                walk()
        except Exception as error:
            log.debug(f"kernels are compiled one by one: {error}")
        list(pool.map(_load, [future.kernel for future in mode.future_kernels.values()]))


def _initializer(device: torch.device) -> Callable[[], None] | None:
    """Initializer of the compiling threads: selects the caller's device."""
    if device.type != "cuda":
        return None
    return partial(torch.cuda.set_device, torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def _not_launching(but: Sequence[object]) -> Iterator[None]:
    """Suppress launches of this thread, except of the kernels in `but`."""
    run, walker = JITFunction.run, threading.get_ident()

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        skips = threading.get_ident() == walker and not any(kernel is one for one in but)
        return run(kernel, *args, warmup=warmup or skips, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def _load(kernel: Any) -> None:
    """Load a compiled kernel and its launcher; None if compilation failed."""
    try:
        if kernel is not None:
            kernel.run  # noqa: B018 - a lazy property that builds the launcher
    except Exception as error:
        log.debug(f"a kernel could not be loaded: {error}")
