"""Starts the process that compiles kernels (see worker.py)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _NoTorch(ModuleType):
    """Stands for torch, which takes seconds to import: the kernels' modules use it, but compiling a kernel does not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args: None})


def _start() -> None:
    sys.modules["torch"] = _NoTorch("torch")
    from chairlift.kernels.compilation.worker import main

    main(*sys.argv[1:])


if __name__ == "__main__":
    _start()
