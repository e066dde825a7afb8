"""Triton's interpreter without the work that it repeats, and with products that do not depend on the tile.

Most of its time goes to types: it builds and checks the same few again for every operation, and it searches the
language for what to replace at every call of a function by another. It multiplies tiles by numpy's BLAS, which on some
processors sums the products of a row in another order when the tile has more rows; tensor cores do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Replace parts of the interpreter for this process; calling it again does nothing."""
    if getattr(interpreter, "_is_fast", False):
        return
    interpreter._is_fast = True  # type: ignore[attr-defined]
    interpreter._patch_lang = _patch_once_per_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _np_dtype_of()
    tl.block_type.__init__ = _known_block_types(tl.block_type.__init__)  # type: ignore[method-assign]
    tl.tensor.__init__ = _known_shapes(tl.tensor.__init__)  # type: ignore[method-assign]
    tl.tuple.__eq__ = _equality_of_shapes(tl.tuple.__eq__)  # type: ignore[method-assign]
    builder = interpreter.interpreter_builder
    builder.create_dot = _dot_of_rows(builder.create_dot)
    if not builder.options.debug:  # only then are overflows of integers asserted, after they were searched for
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once_per_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace the language's functions when a kernel is launched, not again in each function that it calls."""
    patched, visible = set[int](), dict[Any, set[int]]()  # modules of the language: now replaced, seen by a function

    class Scope(interpreter._LangPatchScope):
        def __init__(self, launched: Any) -> None:
            self._launched = launched

        def restore(self) -> None:
            patched.clear()
            self._launched.restore()

    def patch_once(function: Any) -> Any:
        if function not in visible:
            visible[function] = {
                id(value) for value in function.__globals__.values() if value is tl or value is tl.core
            }
        languages = visible[function]
        if languages and languages <= patched:
            return None  # of a function that is called: never restored
        patched.update(languages)
        return Scope(patch(function))

    return patch_once


def _dot_of_rows(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Sum products in float64: rounded to float32, the order of the sum does not show."""

    def dot_of_rows(a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return dot(a, b, d, *options)
        zero = interpreter.TensorHandle(np.zeros((), np.float64), tl.float64)
        product = dot(a, b, zero, *options).data.astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    return dot_of_rows


def _np_dtype_of() -> Callable[[Any], Any]:
    original, known = interpreter._get_np_dtype, dict[Any, Any]()

    def np_dtype_of(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(element, tl.pointer_type):
            return np.dtype(np.uint64)
        if element not in known:
            known[element] = original(element)
        return known[element]

    return np_dtype_of


def _known_block_types(build: Callable[..., None]) -> Callable[..., None]:
    known = dict[tuple[int, ...], tuple[Any, int, str]]()

    def build_known(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is tl.constexpr else size for size in shape)
        if sizes not in known or not all(type(size) is int for size in sizes):
            build(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    return build_known


def _known_shapes(build: Callable[..., None]) -> Callable[..., None]:
    known = dict[tuple[int, ...], tuple[Any, Any]]()

    def build_known(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            build(self, handle, type)
            known[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return build_known


def _equality_of_shapes(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    yes, no = tl.constexpr(True), tl.constexpr(False)

    def compare_shapes(self: Any, other: Any) -> Any:
        if type(other) is not list or not all(type(size) is int for size in other):
            return compare(self, other)
        return yes if self.values == other else no

    return compare_shapes
