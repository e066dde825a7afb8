"""Work that stops and goes on: a forward pass in a thread of its own, which waits in front of each product.

So one image can be encoded over many steps, between which the model decodes, with the code of any vision tower.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_running: ContextVar[SlicedWork[Any] | None] = ContextVar("running", default=None)


class Cancelled(BaseException):
    """Raised in the thread of work that is given up."""


class SlicedWork(Generic[T]):
    """Runs `work` as far as it is allowed to, measured by the weights of the products it has begun."""

    def __init__(self, work: Callable[[], T], total: int, threads: int) -> None:
        """`total`: about the weights that the work multiplies with; `threads`: those of torch."""
        self._work, self._total, self._threads = work, max(1, total), threads
        self._begun, self._allowed = 0, 0.0
        self._waits = self._cancelled = self._ended = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="image encoder", daemon=True)
        self._thread.start()

    def advance(self, share: float) -> T | None:
        """Go on until about `share` of the work is done; return its result if it is over, which it is at 1."""
        with self._changed:
            self._allowed = math.inf if share >= 1 else share * self._total
            self._waits = self._begun > self._allowed
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._waits)
        if self._error is not None:
            raise self._error
        return self._result

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def pause(self, weights: int) -> None:
        """Called in the thread of the work before a product with this many weights."""
        with self._changed:
            self._begun += weights
            if self._begun > self._allowed:
                self._waits = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._cancelled or self._begun <= self._allowed)
            if self._cancelled:
                raise Cancelled

    def _run(self) -> None:
        _running.set(self)
        torch.set_num_threads(self._threads)
        try:
            with self._changed:
                self._waits = True
                self._changed.wait_for(lambda: self._cancelled or self._allowed > 0)
            with torch.inference_mode():
                self._result = None if self._cancelled else self._work()
        except Cancelled:
            pass
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def is_sliced() -> bool:
    """Whether this thread runs work that stops and goes on."""
    return _running.get() is not None


def pause_before_products(modules: Iterable[Any]) -> int:
    """Let sliced work stop in front of the products of these modules; return the weights of all of them."""
    total = 0
    for module in modules:
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d) and weight is not None:
            total += weight.numel()
            module.register_forward_pre_hook(_pause)
    return total


def _pause(module: Any, inputs: Any) -> None:
    work = _running.get()
    if work is not None:
        work.pause(module.weight.numel())
