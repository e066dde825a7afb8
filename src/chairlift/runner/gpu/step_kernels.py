"""Which kernels the steps of a shape launch, and whether they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic

import torch

from chairlift.kernels.gpu import gpu_of
from chairlift.runner.gpu.graphs import Shape

if TYPE_CHECKING:  # triton is imported where there is a GPU
    from chairlift.kernels.compilation.pool import KernelCompiler
    from chairlift.kernels.compilation.record import KernelRecorder
    from chairlift.kernels.compilation.spec import KernelSpec


class StepKernels(Generic[Shape]):
    """The kernels of steps, compiled in processes beside the engine (`kernels/compilation`).

    Kernels are chosen by the shape of a step. While those of its shape are being compiled, a step is computed by
    generic kernels, which serve every shape and were compiled before the first step.
    """

    def __init__(self, walk: Callable[[Shape], object], device: torch.device) -> None:
        """`walk` computes a step of padding."""
        self._walk = walk
        self._device = device
        self._needed: dict[Shape, list[KernelSpec]] = {}  # of shapes that are not ready
        self._ready: set[Shape] = set()
        self._recorder: KernelRecorder | None = None

    @property
    def _enabled(self) -> bool:
        """Not on a CPU, whose interpreter compiles nothing."""
        return self._device.type == "cuda"

    def is_known(self, shape: Shape) -> bool:
        return not self._enabled or shape in self._ready or shape in self._needed

    def is_ready(self, shape: Shape) -> bool:
        """Whether all kernels of a shape are compiled. If they are not known yet, they will be from now on."""
        if not self._enabled or shape in self._ready:
            return True
        self.request([shape])
        if not _compiler().has_compiled(self._needed[shape]):
            return False
        self._ready.add(shape)
        del self._needed[shape]
        return True

    def request(self, shapes: Iterable[Shape]) -> None:
        """Start to compile the kernels of these shapes."""
        for shape in shapes:
            if not self.is_known(shape):
                self._needed[shape] = self.kernels_of([shape])
                _compiler().request(self._needed[shape])

    def wait(self, shapes: Iterable[Shape]) -> None:
        """Compile the kernels of these shapes and wait for them."""
        shapes = list(shapes)
        self.request(shapes)
        for shape in shapes:
            if shape in self._needed:
                _compiler().wait(self._needed[shape])

    def wait_for_requested(self) -> None:
        """Wait for all kernels that are being compiled."""
        self.wait(list(self._needed))

    def wait_for_generic(self, shapes: Iterable[Shape]) -> None:
        """Compile the generic kernels, which these shapes stand for, and wait for them."""
        if self._enabled:
            _compiler().wait(self.kernels_of(shapes, generic=True))

    def wait_for_walk(self, walk: Callable[[], object]) -> None:
        """Compile the kernels that `walk` launches and wait for them; then it launches them without a compilation."""
        if self._enabled:
            _compiler().wait(self._recorded(walk))

    @property
    def busy(self) -> bool:
        """Whether kernels are being compiled."""
        return bool(self._needed) and _compiler().busy

    def kernels_of(self, shapes: Iterable[Shape], *, generic: bool = False) -> list[KernelSpec]:
        """The kernels that steps of these shapes launch."""
        found: dict[KernelSpec, None] = {}
        with kernels_for(tuned=not generic):
            for shape in shapes:
                found |= dict.fromkeys(self._recorded(lambda: self._walk(shape)))  # noqa: B023
        return list(found)

    def _recorded(self, walk: Callable[[], object]) -> list[KernelSpec]:
        """The kernels that `walk` launches."""
        from chairlift.kernels.compilation.record import KernelRecorder
        from chairlift.kernels.triton.layers import begin_step_kernel
        from chairlift.kernels.triton.likeliest import likeliest_kernel

        if self._recorder is None:
            gpu = gpu_of(self._device)
            assert gpu is not None
            self._recorder = KernelRecorder(gpu.arch)
        # These are launched all the same: their tokens are looked up in the embedding and must be valid.
        launched = [begin_step_kernel, likeliest_kernel] if self._device.type == "cuda" else []
        return self._recorder.record(walk, launched=launched)


def kernels_for(*, tuned: bool) -> AbstractContextManager[None]:
    """Compute steps with kernels that suit their shape, or with generic ones."""
    if tuned:
        return nullcontext()
    from chairlift.kernels.triton.launch import generic_kernels

    return generic_kernels()


def _compiler() -> KernelCompiler:
    from chairlift.kernels.compilation.pool import the_compiler

    return the_compiler()
