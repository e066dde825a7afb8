"""The seam of `chairlift bench`: a bench is a folder of this package, or a plugin, that registers a command.

The module `cli` of the folder `long_context` registers `chairlift bench long-context`:

    @bench("long-context", "chairlift bench long-context --lengths 1024,4096")
    def bench_long_context(...) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.registry import Registry
from chairlift.terminal.options import with_option_groups


@dataclass(frozen=True, slots=True)
class Bench:
    """A command of `chairlift bench`: its function's parameters are the options, its docstring is the help."""

    command: Callable[..., None]
    examples: Sequence[str]


BENCHES: Registry[Bench] = Registry("bench", "chairlift.lab.bench", module="cli")


def bench(name: str, *examples: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make a function the command `chairlift bench NAME`, with `examples` below its help."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        BENCHES.register(name)(Bench(with_option_groups(function), examples))
        return function

    return add
