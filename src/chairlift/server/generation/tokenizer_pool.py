"""Tokenising and detokenising, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG = 20_000  # characters, or token ids, from which on a text is long

T = TypeVar("T")


class TokenizerPool:
    """Two lanes: whoever sends long texts waits for others who do, and never holds up the short ones."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="short-text")
        self._long = ThreadPoolExecutor(2, thread_name_prefix="long-text")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work`, which deals with texts of `size` characters or tokens in all, in a thread."""
        lane = self._long if size >= LONG else self._short
        return await asyncio.get_running_loop().run_in_executor(lane, work)
