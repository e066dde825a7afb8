"""Threads for tokenization and detokenization, which would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

LONG_TEXT = 20_000  # characters or token ids

T = TypeVar("T")


class TokenizerPool:
    """Thread pools: short texts never wait for long ones, and prompts never wait for long text jobs."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="short-text")
        self._long = ThreadPoolExecutor(2, thread_name_prefix="long-text")
        self._text_jobs = ThreadPoolExecutor(1, thread_name_prefix="text-job")

    async def run_text_job(self, size: int, work: Callable[[], T]) -> T:
        """Like `run`, for work that no completion needs."""
        return await _run_in(self._text_jobs if size >= LONG_TEXT else self._short, work)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread; `size` is the number of characters or tokens that it processes."""
        return await _run_in(self._long if size >= LONG_TEXT else self._short, work)


async def _run_in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run `work` with the context of its request, which keeps the request's unknown fields."""
    return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, work)
