"""Finds the kernels of a step by computing it without launching them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from chairlift.kernels.compilation.spec import WARP_SIZE, KernelSpec

log = logging.getLogger("chairlift")


class KernelRecorder:
    """Records the kernel variants that a thread would launch on a GPU of compute capability `arch`."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self._backend = make_backend(GPUTarget("cuda", arch, WARP_SIZE))
        self._binders: dict[int, Callable[..., Any]] = {}
        self._specs: dict[tuple[int, str, str], KernelSpec] = {}  # Triton tells variants apart by the key.

    def record(self, walk: Callable[[], object], *, launched: Sequence[object] = ()) -> list[KernelSpec]:
        """The variants that `walk` would launch, each once.

        Only the kernels in `launched` run. The others write nothing, so `walk` must not depend on their results.
        Launches of other threads are not affected.
        """
        specs: dict[KernelSpec, None] = {}
        with self._recording(specs, launched):
            walk()
        return list(specs)

    @contextmanager
    def _recording(self, specs: dict[KernelSpec, None], launched: Sequence[object]) -> Iterator[None]:
        run, walker = JITFunction.run, threading.get_ident()

        def run_recorded(kernel: Any, *args: Any, **options: Any) -> Any:
            if threading.get_ident() != walker:
                return run(kernel, *args, **options)
            try:
                specs[self._spec(kernel, args, options)] = None
            except (TypeError, ValueError) as error:  # a constant that JSON does not have
                log.debug(f"{kernel} is compiled at its first launch: {error}")
            return run(kernel, *args, **options) if any(kernel is other for other in launched) else None

        JITFunction.run = run_recorded
        try:
            yield
        finally:
            JITFunction.run = run

    def _spec(self, kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> KernelSpec:
        options = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
        options["debug"] = options.get("debug", kernel.debug) or knobs.runtime.debug
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        if id(kernel) not in self._binders:
            self._binders[id(kernel)] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        bound, specialization, left = self._binders[id(kernel)](*args, **options)
        key = (id(kernel), str(specialization), str(left))
        if key not in self._specs:
            packed, signature, constants, attributes = kernel._pack_args(
                self._backend, options, bound, specialization, left
            )
            self._specs[key] = KernelSpec.of(kernel, signature, constants, attributes, packed.__dict__, self._arch)
        return self._specs[key]
