"""Threads for work that would block the event loop: tokenization, detokenization, parsing."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

LONG_TEXT = 20_000  # characters or token ids
JOB_SIZE = 1000  # A job costs as much beside its text.

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    """A job that waits for a thread."""

    size: int
    turn: asyncio.Future[None]  # done once a thread is free for it


class FairThreads:
    """A thread pool that tenants share.

    The next job is of the tenant whose jobs have had the least size so far, among those with jobs; a tenant never
    occupies all threads, so that another one's job does not wait for its long ones to end.
    """

    def __init__(self, name: str, most: int, weights: Mapping[str, float] | None = None) -> None:
        """`most`: threads that one tenant may occupy."""
        self._most = most
        self._weights = weights or {}
        self._threads = ThreadPoolExecutor(most + 1, thread_name_prefix=name)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Job]] = {}
        # The size of a tenant's jobs so far, divided by its weight; a tenant that comes begins where the last job was.
        self._served: dict[str, float] = {}
        self._last_served = 0.0

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread, with the context of its request, which keeps the request's unknown fields. A job that
        is cancelled before it starts is not run."""
        loop = asyncio.get_running_loop()
        job = _Job(size, loop.create_future())
        self._waiting.setdefault(tenant, deque()).append(job)
        self._served.setdefault(tenant, self._last_served)
        self._give_turns()
        try:
            await job.turn
        except asyncio.CancelledError:
            if not job.turn.cancelled():  # it has a thread, which it has not used yet
                self._end(tenant)
            elif job in self._waiting.get(tenant, ()):
                self._waiting[tenant].remove(job)
            self._forget_if_idle(tenant)
            raise
        running = loop.run_in_executor(self._threads, copy_context().run, work)
        try:
            return await asyncio.shield(running)
        finally:
            if running.done():
                self._end(tenant)
            else:  # its client has left, but the thread works on
                running.add_done_callback(lambda _: self._end(tenant))

    def _give_turns(self) -> None:
        while self._running.total() <= self._most:
            ready = [tenant for tenant, jobs in self._waiting.items() if jobs and self._running[tenant] < self._most]
            if not ready:
                return
            tenant = min(ready, key=self._served.__getitem__)
            job = self._waiting[tenant].popleft()
            if job.turn.cancelled():
                continue
            self._last_served = self._served[tenant]
            self._served[tenant] += (job.size + JOB_SIZE) / self._weights.get(tenant, 1.0)
            self._running[tenant] += 1
            job.turn.set_result(None)

    def _end(self, tenant: str) -> None:
        """Give the thread of a job to the next one."""
        self._running[tenant] -= 1
        self._forget_if_idle(tenant)
        self._give_turns()

    def _forget_if_idle(self, tenant: str) -> None:
        if not self._running[tenant] and not self._waiting.get(tenant):
            del self._running[tenant]
            self._waiting.pop(tenant, None)
            self._served.pop(tenant, None)


class TokenizerPool:
    """Thread pools: short texts never wait for long ones, texts never wait for images, which may be fetched from a slow
    server, prompts never wait for long text jobs, and no tenant waits until the jobs of another one are done."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of tenants in their shares; 1 for others."""
        self._short = FairThreads("short-text", 2, weights)
        self._long = FairThreads("long-text", 2, weights)
        self._text_jobs = FairThreads("text-job", 1, weights)
        self._images = FairThreads("images", 2, weights)

    async def run_text_job(self, tenant: str, size: int, work: Callable[[], T], *, images: bool = False) -> T:
        """Like `run`, for work that no completion needs."""
        pool = self._text_jobs if size >= LONG_TEXT else self._short
        return await (self._images if images else pool).run(tenant, size, work)

    async def run(self, tenant: str, size: int, work: Callable[[], T], *, images: bool = False) -> T:
        """Run `work` in a thread; `size` is the number of characters or tokens that it processes, and `images` says
        whether it may read any."""
        pool = self._long if size >= LONG_TEXT else self._short
        return await (self._images if images else pool).run(tenant, size, work)
