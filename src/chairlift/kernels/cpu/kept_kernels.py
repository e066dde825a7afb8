"""Kernels whose machine code is kept on disk, so that later starts load it instead of compiling it again.

numba keeps machine code in pickles, which run code when they are read, so the folder must be one that no other user can
change.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event

from chairlift.kernels.cpu.scalar_math import compiled
from chairlift.loading.known_models import cache_dir
from chairlift.machine.files import private_folder, require_private_content

log = logging.getLogger("chairlift")

LOG_SECONDS = 5.0  # Lines about functions that are compiled are no closer than this.


def compiled_and_kept(fastmath: set[str] | bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Like `compiled`, kept on disk where that is possible: for functions called from Python."""

    def decorate(function: Callable[..., Any]) -> Any:
        return _compile_kept(lambda keep: compiled(fastmath, cache=keep)(function))

    return decorate


def kept_c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile a C function with sums in the given order, to be called by its address; kept where that is possible."""
    return _compile_kept(lambda keep: numba.cfunc(signature, cache=keep, error_model="numpy")(function))


def _compile_kept(compile: Callable[[bool], Any]) -> Any:
    """Call `compile` with whether numba can keep the machine code, while its folder is set."""
    folder = _folder()
    if folder is None:
        return compile(False)
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(folder)
        return compile(True)
    except RuntimeError:  # a function that comes from no file
        return compile(False)
    finally:
        numba.config.CACHE_DIR = before


@cache
def _folder() -> Path | None:
    """The folder of this version of the kernels; None, with a warning, if it cannot be used. numba only checks the file
    of a function, not those of the functions it calls."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    version = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    chosen = numba.config.CACHE_DIR  # NUMBA_CACHE_DIR
    try:
        folder = private_folder((Path(chosen) if chosen else cache_dir() / "kernels") / version)
        require_private_content(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        way_out = "each start compiles them again; NUMBA_CACHE_DIR names another folder"
        log.warning(f"compiled kernels are not kept: {error}: {way_out}")
        return None
    return folder


class _CompilationLog(event.Listener):
    """Says that functions are compiled, which takes most of the first start, and how many are done."""

    def __init__(self) -> None:
        self._count = 0
        self._start = self._last_log = 0.0

    def on_start(self, event: Any) -> None:
        if not self._start:
            self._start = self._last_log = time.monotonic()
            folder = _folder()
            kept = "not kept for later starts" if folder is None else f"kept for later starts in {folder}"
            log.info(f"kernels    compiling them for this CPU, {kept}")

    def on_end(self, event: Any) -> None:
        self._count += 1
        now = time.monotonic()
        if now - self._last_log > LOG_SECONDS:
            self._last_log = now
            log.info(f"kernels    {self._count} functions compiled in {now - self._start:.0f} s")


_compilation_log = _CompilationLog()
event.register("numba:compile", _compilation_log)
