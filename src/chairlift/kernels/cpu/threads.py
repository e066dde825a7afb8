"""A team of threads that run one kernel together.

A model step has hundreds of small phases, each depending on the one before. Waking threads for every phase would cost
more than many of the phases, so the whole step is one call: every thread runs the same kernel, claims work items of a
phase until none is left (`claim`), and waits for the others at its end (`barrier`). A thread that has waited long
sleeps for short times.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.kernels.cpu.compiling import compiled
from chairlift.machine.hardware import default_threads

ARRIVED, ROUND, CLAIMED, BROKEN = 0, 64, 128, 192  # byte offsets into the shared state, each on its own cache line
NOTHING_LEFT = 2**62
LOOKS = 64  # reads of the shared state between two looks at the clock; a power of two
# A thread that waits longer sleeps, since the one it waits for may have lost its core. With two busy processes on two
# cores, a token of the default model takes 16 to 18 ms with 50 to 300 us, 24 to 27 with 3 ms (alone 6.6 to 7.8), and
# 370 to 730 with sched_yield, which hands over the core for a whole time slice at every barrier.
PATIENCE = 50_000  # nanoseconds; more costs as much at every barrier where threads share a core
NAP = 50  # microseconds
_I64 = ir.IntType(64)


@intrinsic
def _fetch_add(_: Any, address: Any, amount: Any) -> Any:
    """Add to a shared number atomically and return its old value."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return b.atomic_rmw("add", b.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def _read(_: Any, address: Any) -> Any:
    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return b.load_atomic(b.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.intp), generate


@intrinsic
def _write(_: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@intrinsic
def _sleep(_: Any, microseconds: Any) -> Any:
    """Leave the core to other threads for at least this time."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        word = ir.IntType(32)
        sleep = cgutils.get_or_insert_function(b.module, ir.FunctionType(word, [word]), "usleep")
        b.call(sleep, [b.trunc(args[0], word)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def nanoseconds(_: Any) -> Any:
    """Read a monotonic clock."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, _args: Sequence[ir.Value]) -> ir.Value:
        parts = ir.ArrayType(_I64, 2)  # seconds, nanoseconds
        place = cgutils.alloca_once(b, parts)
        signature = ir.FunctionType(ir.IntType(32), [ir.IntType(32), parts.as_pointer()])
        clock = cgutils.get_or_insert_function(b.module, signature, "clock_gettime")
        b.call(clock, [ir.IntType(32)(time.CLOCK_MONOTONIC), place])
        both = b.load(place)
        return b.add(b.mul(b.extract_value(both, 0), _I64(1_000_000_000)), b.extract_value(both, 1))

    return types.int64(), generate


@compiled()
def barrier(shared: Any, members: int) -> None:
    """Wait for all threads of the team and reset the claims. Returns at once if a thread has failed; then nothing more
    can be claimed and `Team.run` raises."""
    address = shared.ctypes.data
    now = _read(address + ROUND)
    if _fetch_add(address + ARRIVED, 1) == members - 1:
        _write(address + ARRIVED, 0)
        _write(address + CLAIMED, 0)
        _write(address + ROUND, now + 1)
        return
    looks, begun = 0, 0
    while _read(address + ROUND) == now and _read(address + BROKEN) == 0:
        looks += 1
        if looks & (LOOKS - 1) == 0:
            if begun == 0:
                begun = nanoseconds()
            elif nanoseconds() - begun > PATIENCE:
                _sleep(NAP)


@compiled()
def claim(shared: Any, amount: int) -> Any:
    """Claim the next `amount` work items since the last barrier; returns the index of the first."""
    return _fetch_add(shared.ctypes.data + CLAIMED, amount)


class Team:
    """`size` threads, including the caller's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._shared = np.zeros(64, dtype=np.int64)
        self._set_up()
        # A forked child has none of the threads, and a lock held by another thread stays locked there.
        os.register_at_fork(after_in_child=self._set_up)

    def _set_up(self) -> None:
        """Set up the state; worker threads start on the first run."""
        self._lock = threading.Lock()  # one kernel at a time
        self._kernel: Callable[..., None] | None = None
        self._arguments: tuple[Any, ...] = ()
        self._failure: BaseException | None = None
        # Of each worker: released to start it, and by it when it is done. Plain locks, since the semaphores of Python
        # are written in Python, which takes long with the caches full of weights.
        self._workers: list[tuple[threading.Lock, threading.Lock]] = []

    def _call_in(self) -> None:
        while len(self._workers) < self.size - 1:
            start, end = threading.Lock(), threading.Lock()
            start.acquire()
            end.acquire()
            threading.Thread(target=self._work, args=(start, end), name="chairlift-kernel", daemon=True).start()
            self._workers.append((start, end))

    def run(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Run `kernel(shared, size, *arguments)` on every thread of the team; returns when all are done."""
        with self._lock:
            self._call_in()
            self._kernel, self._arguments, self._failure = kernel, arguments, None
            self._shared[:] = 0
            started = 0
            try:
                for start, _ in self._workers:
                    start.release()
                    started += 1
                kernel(self._shared, self.size, *arguments)
            except BaseException:
                self._fail()
                raise
            finally:
                interrupted = self._wait_for(started)
                self._kernel, self._arguments = None, ()
            if interrupted is not None:
                raise interrupted
            if self._failure is not None:
                raise self._failure

    def _wait_for(self, started: int) -> BaseException | None:
        """Wait for the first workers, also if a signal handler raises meanwhile: returns that exception."""
        interrupted = None
        for _, end in self._workers[:started]:
            while True:
                try:
                    end.acquire()
                    break
                except BaseException as error:
                    interrupted = error
                    self._fail()
        return interrupted

    def _fail(self) -> None:
        """Mark the team as failed, so that barriers return and claims end."""
        self._shared[CLAIMED // 8] = NOTHING_LEFT
        self._shared[BROKEN // 8] = 1

    def _work(self, start: threading.Lock, end: threading.Lock) -> None:
        while True:
            start.acquire()
            try:
                assert self._kernel is not None
                self._kernel(self._shared, self.size, *self._arguments)
            except BaseException as error:  # raised in the caller; the team stays usable
                self._failure = error
                self._fail()
            finally:
                end.release()


_team: Team | None = None


def the_team() -> Team:
    """The team of this process; by default with a thread for every core that it may use."""
    global _team
    if _team is None:
        _team = Team(default_threads())
    return _team


def set_team_size(size: int) -> None:
    """Make the next call of `the_team` return a team of this size; engines that have a team keep it."""
    global _team
    if _team is None or _team.size != size:
        _team = Team(size)
