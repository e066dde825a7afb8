"""Compiling the kernels of a step side by side.

A kernel is compiled when it is first launched, and so is the C function that launches it: half a second each, and a
first step has some twenty of them, one after the other. Here a step is walked through without launching anything, and
all that is missing is compiled at once, by as many threads as there are processors: most of the time goes to ptxas, the
C compiler and LLVM, which do not hold up Python.
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
    """Compile what `walk` would launch. The kernels `launched` do run; the others write nothing, so what `walk`
    computes from their results must not depend on the values. Other threads launch theirs as ever.

    What goes wrong here shows again, and better, when the kernel is launched.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # came with Triton 3.5
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
    """Of the threads: they use the same device as we do."""
    if device.type != "cuda":
        return None
    return partial(torch.cuda.set_device, torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def _not_launching(but: Sequence[object]) -> Iterator[None]:
    """This thread."""
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
    """Bring it to the device, with what launches it. None: it could not be compiled."""
    try:
        if kernel is not None:
            kernel.run  # noqa: B018 - is made when it is first asked for
    except Exception as error:
        log.debug(f"a kernel could not be loaded: {error}")
