"""The process that compiles kernels: `python -m chairlift.kernels.compilation PROCESSES [LIBRARIES]`.

It reads one kernel per line and answers with one line for each: its number, and `ok` or the reason why it failed. Every
kernel is compiled by a fork of this process, which has imported everything already and has one thread. The binaries are
left in Triton's cache on disk. The process ends when its input ends, or after a minute without work.
"""

from __future__ import annotations

import os
import selectors
from collections import deque
from contextlib import suppress
from typing import Any

import triton
from triton import knobs
from triton.backends.nvidia import driver

from chairlift.kernels.compilation.spec import KernelSpec

NICENESS = 10  # requests come first
IDLE_SECONDS = 60.0
MAX_PROBLEM = 500  # characters of a failure's reason


def compile_spec(spec: KernelSpec) -> None:
    """Compile a kernel and the C function that launches it."""
    source = spec.source()
    kernel = triton.compile(source, target=spec.target, options=spec.options)
    build_launcher(source, kernel.metadata)


def build_launcher(source: Any, metadata: Any) -> None:
    """Put the C function that launches a kernel into Triton's cache, as its first launch would."""
    constants = {
        (source.fn.arg_names.index(path),) if isinstance(path, str) else path: value
        for path, value in source.constants.items()
    }
    code = driver.make_launcher(constants, dict(source.signature), getattr(metadata, "tensordesc_meta", None))
    _build(code, "__triton_launcher")


def build_driver() -> None:
    """Put Triton's own interface to the CUDA driver into the cache."""
    with open(os.path.join(driver.dirname, "driver.c")) as file:
        _build(file.read(), "cuda_utils")


def _build(code: str, name: str) -> None:
    with suppress(ImportError):  # it is built, but loading it needs the CUDA driver, which may not be here
        driver.compile_module_from_src(
            src=code,
            name=name,
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )


class CompileServer:
    """Compiles the kernels of its input, several at a time."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._waiting: deque[tuple[int, str]] = deque()  # (line, spec)
        self._running: dict[int, tuple[int, int]] = {}  # pid -> (line, read end of its answer)
        self._num_lines = 0
        self._buffer = b""

    def serve(self) -> None:
        """Answer until the input ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            while True:
                ready = selector.select(IDLE_SECONDS)
                if not ready and not self._running:
                    return
                for key, _ in ready:
                    if key.fd == 0:
                        if not self._read():
                            return
                    else:
                        selector.unregister(key.fd)
                        self._answer(key.data, key.fd)
                while self._waiting and len(self._running) < self._processes:
                    pid, answer = self._start(*self._waiting.popleft())
                    selector.register(answer, selectors.EVENT_READ, pid)

    def _read(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._waiting.append((self._num_lines, line.decode()))
            self._num_lines += 1
        return bool(data)

    def _start(self, line: int, text: str) -> tuple[int, int]:
        answer, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(answer)
            os.write(writer, _attempt(text).encode())
            os._exit(0)
        os.close(writer)
        self._running[pid] = line, answer
        return pid, answer

    def _answer(self, pid: int, answer: int) -> None:
        """Report a kernel that is done; a process that crashed has left no answer."""
        line, _ = self._running.pop(pid)
        said = os.read(answer, MAX_PROBLEM).decode(errors="replace") or "the compiler crashed"
        os.close(answer)
        os.waitpid(pid, 0)
        print(line, said.replace("\n", " "), flush=True)


def _attempt(text: str) -> str:
    try:
        compile_spec(KernelSpec(text))
    except Exception as error:  # reported to the engine, where the kernel's first launch fails in the same way
        return f"{type(error).__name__}: {error}"[:MAX_PROBLEM] or type(error).__name__
    return "ok"


def main(processes: str, libraries: str = "") -> None:
    os.nice(NICENESS)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # compiling needs no GPU; a context would take its memory
    if libraries:
        knobs.nvidia.libcuda_path = libraries
    CompileServer(int(processes)).serve()
