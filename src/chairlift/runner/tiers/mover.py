"""Moves parts of blocks between the device and the stores of the tiers.

Parts are read from the device when they are saved. All else is done by two threads: one loads, the other writes and
removes files, so a slow disk delays loads of other parts as little as possible, and the engine never.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from chairlift.core.kv.tiers import LoadEnded, Lost, PartKey, PartMove, TierMover
from chairlift.runner.tiers.stores import Data, DiskStore, HostStore

log = logging.getLogger("chairlift")

HOST, DISK = "host", "disk"
MAX_QUEUED_BYTES = 256 << 20  # bytes that wait to be written; what is saved beyond them is lost
CLOSING_SECONDS = 10.0  # The engine waits so long at its end for what is queued.
PAUSE_AFTER_ERROR = 5.0  # seconds in which nothing is written after a write failed, as on a full disk
NICENESS = 10  # The writing thread is nice: computing goes first.


class DeviceParts(Protocol):
    """The parts of blocks on the device, as bytes."""

    def read(self, move: PartMove) -> Data:
        """A copy of a part; steps launched later may overwrite its place."""
        ...

    def write(self, move: PartMove, data: Data) -> None:
        """Overwrite the place of a part, which no step in flight reads; called by a thread."""
        ...


class ThreadedMover(TierMover):
    """Moves parts with one thread for loads and one for writing."""

    def __init__(self, device: DeviceParts, host: HostStore | None, disk: DiskStore | None) -> None:
        self._device = device
        self._host, self._disk = host, disk
        self._reports: deque[Lost | LoadEnded] = deque()
        self._news = threading.Event()
        self._loads: SimpleQueue[tuple[int, list[tuple[str, PartMove, Data | None]]] | None] = SimpleQueue()
        self._lock = threading.Condition()  # guards the next four
        self._unremoved: dict[PartKey, None] = {}  # Their files are removed before anything else is written.
        self._unwritten: dict[PartKey, Data] = {}  # The order is that of writing.
        self._num_queued = 0  # bytes of these
        self._closing = False
        self._threads = [threading.Thread(target=self._run_loads, name="kv-loads", daemon=True)]
        if disk is not None:
            self._threads.append(threading.Thread(target=self._run_writes, name="kv-writes", daemon=True))
        for thread in self._threads:
            thread.start()

    def save(self, tier_moves: Sequence[tuple[Sequence[str], PartMove]]) -> None:
        for tiers, move in tier_moves:
            data = self._device.read(move)
            if HOST in tiers and self._host is not None:
                self._host.put(move.key, data)
            if DISK in tiers:
                self._queue(move.key, data)

    def load(self, load_id: int, moves: Sequence[tuple[str, PartMove]]) -> None:
        self._loads.put((load_id, [(tier, move, self._in_memory(tier, move.key)) for tier, move in moves]))

    def drop(self, tier: str, keys: Sequence[PartKey]) -> None:
        if tier == HOST and self._host is not None:
            for key in keys:
                self._host.evict(key)
        elif tier == DISK and self._disk is not None:
            with self._lock:
                for key in keys:
                    self._num_queued -= len(self._unwritten.pop(key, b""))
                    self._unremoved[key] = None
                self._lock.notify_all()

    def reports(self) -> Sequence[Lost | LoadEnded]:
        self._news.clear()
        found = list[Lost | LoadEnded]()
        while self._reports:
            found.append(self._reports.popleft())
        return found

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._loads.put(None)
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._disk is not None and not self._threads[-1].is_alive():
            self._disk.close()

    # ---- loads --------------------------------------------------------------------------------------------------

    def _in_memory(self, tier: str, key: PartKey) -> Data | None:
        """The bytes of a part that need not be read from a file."""
        if tier == HOST:
            return None if self._host is None else self._host.get(key)
        with self._lock:
            return self._unwritten.get(key)

    def _run_loads(self) -> None:
        while (job := self._loads.get()) is not None:
            load_id, moves = job
            seconds, num_loaded = defaultdict[str, float](float), 0
            for tier, move, data in moves:
                begun = time.perf_counter()
                if not self._load(tier, move, data):
                    break  # Parts after a missing one are of no use.
                seconds[tier] += time.perf_counter() - begun
                num_loaded += 1
            failed = frozenset(move.key for _, move, _ in moves[num_loaded:])
            self._report(LoadEnded(load_id, failed, seconds))

    def _load(self, tier: str, move: PartMove, data: Data | None) -> bool:
        """Copy one part to the device; return False, and report it as lost, if it is missing or damaged."""
        try:
            if data is None and tier == DISK and self._disk is not None:
                data = self._disk.get(move.key)
            if data is not None:
                self._device.write(move, data)
                return True
        except Exception as error:  # Whatever it is, the part is computed instead.
            log.debug(f"tier       a part was not loaded: {error}")
        self._report(Lost(tier, move.key))
        return False

    def _report(self, report: Lost | LoadEnded) -> None:
        self._reports.append(report)
        self._news.set()

    # ---- writing ------------------------------------------------------------------------------------------------

    def _queue(self, key: PartKey, data: Data) -> None:
        with self._lock:
            if self._num_queued + len(data) <= MAX_QUEUED_BYTES and not self._closing:
                self._unwritten[key] = data
                self._num_queued += len(data)
                self._lock.notify_all()
                return
        self._report(Lost(DISK, key))

    def _run_writes(self) -> None:
        assert self._disk is not None
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        paused_until = 0.0
        while (work := self._next_work()) is not None:
            removed, part = work
            for key in removed:
                self._disk.evict(key)
            if part is None:
                continue
            key, data = part
            try:
                if time.monotonic() < paused_until:
                    raise OSError("the last write failed a moment ago")
                self._disk.put(key, data)
            except Exception as error:
                if time.monotonic() >= paused_until:
                    log.warning(f"tier       blocks are not written to disk for a while: {error}")
                    paused_until = time.monotonic() + PAUSE_AFTER_ERROR
                self._report(Lost(DISK, key))
            with self._lock:
                if self._unwritten.get(key) is data:  # It was not dropped meanwhile.
                    self._num_queued -= len(self._unwritten.pop(key))

    def _next_work(self) -> tuple[list[PartKey], tuple[PartKey, Data] | None] | None:
        """The files to remove, and then the part that has waited longest; None once the engine ends and all is done."""
        with self._lock:
            while not self._unwritten and not self._unremoved and not self._closing:
                self._lock.wait()
            removed, self._unremoved = list(self._unremoved), {}
            part = next(iter(self._unwritten.items()), None)
            return None if part is None and not removed else (removed, part)
