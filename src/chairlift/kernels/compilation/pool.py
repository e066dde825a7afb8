"""Compiles kernels in processes beside the engine, which goes on meanwhile."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from triton.backends.nvidia import driver

from chairlift.kernels.compilation.spec import KernelSpec

log = logging.getLogger("chairlift")

MAX_PROCESSES = 32
SPARE_PROCESSORS = 2  # These are left to the engine and the front end.
WORKER = "chairlift.kernels.compilation"


@cache
def the_compiler() -> KernelCompiler:
    """The compiler of this process, which all its engines share."""
    return KernelCompiler()


class KernelCompiler:
    """Kernels that are compiled, and those that are being compiled. A kernel whose compilation failed counts as
    compiled: its first launch shows the error."""

    def __init__(self, libraries: str = "") -> None:
        """`libraries`: the folder of libcuda.so.1, if the system's linker does not know it."""
        processors = len(os.sched_getaffinity(0))
        self._command = [sys.executable, "-m", WORKER, str(max(1, min(MAX_PROCESSES, processors - SPARE_PROCESSORS)))]
        self._command += [libraries] if libraries else []
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: queue.SimpleQueue[KernelSpec | None] = queue.SimpleQueue()
        self._requests: list[KernelSpec] = []  # An answer has a spec's index in this list.
        self._pending: set[KernelSpec] = set()
        self._compiled: set[KernelSpec] = set()
        self._changed = threading.Condition()
        self.problems: dict[KernelSpec, str] = {}  # These kernels could not be compiled, each for its reason.
        self.num_compiled = 0  # Kernels that were in Triton's cache do not count.

    def request(self, specs: Iterable[KernelSpec]) -> None:
        """Start to compile the kernels that are not compiled yet."""
        for spec in specs:
            with self._changed:
                if spec in self._compiled or spec in self._pending:
                    continue
            if spec.is_cached():
                with self._changed:
                    self._compiled.add(spec)
                continue
            with self._changed:
                if self._process is None:
                    self._start()
                self._pending.add(spec)
                self._requests.append(spec)
                self._outbox.put(spec)

    def has_compiled(self, specs: Iterable[KernelSpec]) -> bool:
        """Whether all of these are compiled."""
        with self._changed:
            return self._compiled.issuperset(specs)

    def wait(self, specs: Iterable[KernelSpec]) -> None:
        """Compile these kernels and wait for them."""
        unique_specs = set(specs)
        self.request(unique_specs)
        with self._changed:
            self._changed.wait_for(lambda: not self._pending & unique_specs)

    @property
    def busy(self) -> bool:
        with self._changed:
            return bool(self._pending)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._outbox, self._requests = queue.SimpleQueue(), []
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Writing may block: the process reads nothing before it has imported Triton.
        threading.Thread(target=_write, args=(self._outbox, self._process.stdin), daemon=True).start()
        threading.Thread(target=self._read, args=(self._outbox, self._process.stdout), daemon=True).start()

    def _read(self, outbox: queue.SimpleQueue[KernelSpec | None], pipe: IO[bytes]) -> None:
        for line in pipe:
            number, said = line.decode().rstrip("\n").split(" ", 1)
            spec = self._requests[int(number)]
            if said != "ok":
                log.debug(f"{spec.name} could not be compiled beside the engine: {said}")
                self.problems[spec] = said
            with self._changed:
                self.num_compiled += said == "ok"
                self._pending.discard(spec)
                self._compiled.add(spec)
                self._changed.notify_all()
        with self._changed:
            self._process = None
            if self._pending:
                log.warning("the process that compiles kernels has ended; they are compiled at their first launch")
            self._compiled |= self._pending
            self._pending.clear()
            self._changed.notify_all()
        outbox.put(None)


def _write(outbox: queue.SimpleQueue[KernelSpec | None], pipe: IO[bytes]) -> None:
    with suppress(OSError), pipe:  # the process has ended, which the other thread handles
        while (spec := outbox.get()) is not None:
            pipe.write(spec.text.encode() + b"\n")
            pipe.flush()


@contextmanager
def libcuda_stub() -> Iterator[str]:
    """A folder with an empty libcuda.so.1, or "" if the driver's own library is here."""
    try:
        driver.libcuda_dirs()
    except AssertionError:
        pass
    else:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="chairlift-") as folder:
        source = Path(folder) / "empty.c"
        source.touch()
        library = Path(folder) / "libcuda.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
        yield folder
