"""Kernel variants to compile, as JSON with all that Triton's cache key depends on; a step that is computed without
launching its kernels shows which it needs."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction, create_function_from_signature, get_cache_invalidating_env_vars

WARP_SIZE = 32
MAX_NAME = 150  # Triton cuts the name of a kernel so in the names of its files.


@dataclass(frozen=True)
class KernelSpec:
    """A kernel with the types, constants and options of one launch."""

    text: str  # JSON, the same for the same variant

    @classmethod
    def of(
        cls,
        kernel: JITFunction[Any],
        signature: Mapping[str, Any],
        constants: Mapping[tuple[int, ...], Any],
        attributes: Mapping[tuple[int, ...], Any],
        options: Mapping[str, Any],
        arch: int,
    ) -> KernelSpec:
        fields = {
            "module": kernel.fn.__module__,
            "name": kernel.fn.__name__,
            "signature": dict(signature),
            "constants": [[list(path), _plain(value)] for path, value in constants.items()],
            "attributes": [[list(path), value] for path, value in attributes.items()],
            "options": dict(options),
            "arch": arch,
        }
        return cls(json.dumps(fields))

    @property
    def name(self) -> str:
        return str(self._data["name"])

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", self._data["arch"], WARP_SIZE)

    @property
    def options(self) -> dict[str, Any]:
        return {name: _tuples(value) for name, value in self._data["options"].items()}

    def source(self) -> ASTSource:
        data = self._data
        kernel = getattr(importlib.import_module(data["module"]), data["name"])
        constants = {tuple(path): _constant(value) for path, value in data["constants"]}
        attributes = {tuple(path): value for path, value in data["attributes"]}
        signature = {name: _tuples(value) for name, value in data["signature"].items()}
        if kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            return GluonASTSource(kernel, signature, constants, attributes)
        return ASTSource(kernel, signature, constants, attributes)

    def is_cached(self) -> bool:
        """Whether its binary is in Triton's cache on disk."""
        source, backend = self.source(), make_backend(self.target)
        key = get_cache_key(source, backend, backend.parse_options(self.options), get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(manager.get_group(f"{source.name[:MAX_NAME]}.json"))

    @cached_property
    def _data(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.text)
        return fields


def _plain(value: Any) -> Any:
    """A constant as JSON; Triton tells a number from a `constexpr` of the same number."""
    if isinstance(value, tl.constexpr):
        return {"constexpr": _plain(value.value)}
    return {"dtype": str(value)} if isinstance(value, tl.dtype) else value


def _constant(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return tl.dtype(value["dtype"]) if "dtype" in value else tl.constexpr(_constant(value["constexpr"]))


def _tuples(value: Any) -> Any:
    """JSON has lists where Triton has tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


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
