"""The kernels of captured steps, and the graphs that start all of them by one call.

A capture takes 15 to 45 ms once the kernels are compiled, in which the device does nothing else: two captures at once,
or one beside a step, would share memory that only one may use. So steps are captured while there are no requests, or
when their shape occurs again. Until then, and while their kernels are being compiled, kernels are launched one by one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from chairlift.kernels.gpu import gpu_of, on_gpu

if TYPE_CHECKING:  # triton is imported where there is a GPU
    from chairlift.kernels.compilation.pool import KernelCompiler
    from chairlift.kernels.compilation.spec import KernelRecorder, KernelSpec


log = logging.getLogger("chairlift")

CAPTURE_AFTER = 2  # times that a shape occurred: a capture takes as long as two or three steps kernel by kernel
KEPT_FREE = 2**28  # bytes beside the largest step, for the driver
Shape = TypeVar("Shape", bound=Hashable)
Computed = TypeVar("Computed")
_ADVICE = "others are slower to start; lower kv_memory or max_batch_tokens"


class StepKernels(Generic[Shape]):
    """The kernels of steps, compiled in processes beside the engine (`kernels/compilation`).

    Kernels are chosen by the shape of a step. While those of its shape are being compiled, a step is computed by
    generic kernels, which serve every shape and were compiled before the first step.
    """

    def __init__(self, walk: Callable[[Shape], object], device: torch.device) -> None:
        """`walk` computes a step of padding."""
        self._walk = walk
        self._device = device
        self._needed: dict[Shape, list[KernelSpec]] = {}  # Only shapes that are not ready are listed.
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
            _compiler().wait(self._record_launches(walk))

    def kernels_of(self, shapes: Iterable[Shape], *, generic: bool = False) -> list[KernelSpec]:
        """The kernels that steps of these shapes launch."""
        kernels: dict[KernelSpec, None] = {}
        with kernels_for(tuned=not generic):
            for shape in shapes:
                kernels |= dict.fromkeys(self._record_launches(lambda: self._walk(shape)))  # noqa: B023
        return list(kernels)

    def _record_launches(self, walk: Callable[[], object]) -> list[KernelSpec]:
        """The kernels that `walk` launches."""
        from chairlift.kernels.compilation.spec import KernelRecorder
        from chairlift.kernels.triton.layers import begin_step_kernel
        from chairlift.kernels.triton.sampling import likeliest_kernel

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


def can_capture(device: torch.device) -> bool:
    return on_gpu(device)


def has_room(device: torch.device, step_bytes: int, taken: int) -> bool:
    """Whether the largest step, of `step_bytes`, still fits after a capture that takes `taken` and keeps it.

    To be called when torch's cache of free memory is empty.
    """
    if not can_capture(device):
        return True
    return torch.cuda.mem_get_info(device)[0] > step_bytes + KEPT_FREE + taken


@dataclass(frozen=True, slots=True)
class Graph(Generic[Computed]):
    """A captured step."""

    graph: Any
    step: Computed

    def replay(self) -> Computed:
        self.graph.replay()
        return self.step


class Graphs(Generic[Shape, Computed]):
    """The captured steps, or passes of a draft network, by shape."""

    def __init__(
        self,
        prepare: Callable[[Shape], int],
        forward: Callable[[Shape], Computed],
        likely: Sequence[Shape],
        has_room: Callable[[int], bool],
        kernels: StepKernels[Shape],
    ) -> None:
        """`forward` computes a step of a shape. `prepare` computes one of padding, which loads its kernels,
        and returns the memory it took. `likely`: shapes to capture when there is time, in this order. `has_room`:
        whether there is memory for a capture of this size. `kernels`: those that the shapes launch.
        """
        self._prepare = prepare
        self._forward = forward
        self.likely = likely
        self._has_room = has_room
        self._kernels = kernels
        self._captured: dict[Shape, Graph[Computed] | None] = {}  # None: there is no memory for it
        self._seen: dict[Shape, int] = {}  # how often shapes occurred that are not captured
        self._full = False  # there is no memory for any more
        self._pool: Any = None

    def is_typical(self, shape: Shape) -> bool:
        """Whether the next step of this shape takes as long as later ones; to be called before `find`.

        Not so if it is going to be captured.
        """
        return shape in self._captured or self._full

    def find(self, shape: Shape) -> Graph[Computed] | None:
        """The graph of a step, or None if its kernels are to be launched one by one. Counts the shape as seen."""
        if shape in self._captured:
            return self._captured[shape]
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] >= CAPTURE_AFTER and self._kernels.is_ready(shape):
            self.capture(shape)
        return self._captured.get(shape)

    @property
    def missed(self) -> list[Shape]:
        """Shapes that occurred and are not captured."""
        return list(self._seen)

    def prepare_next(self, others: Sequence[Shape] = ()) -> bool:
        """Find out the kernels of a likely shape or one of `others`, for other processes to compile, or capture a shape
        whose kernels are compiled; False if there is nothing to do for now."""
        unknown = next((shape for shape in (*self.likely, *others) if not self._kernels.is_known(shape)), None)
        if unknown is not None:
            self._kernels.request([unknown])
            return True
        return self.capture_next()

    def capture_all(self, shapes: Sequence[Shape]) -> None:
        """Compile and capture these shapes now."""
        self._kernels.wait(shapes)
        for shape in shapes:
            self.capture(shape)

    def capture_next(self) -> bool:
        """Capture a shape whose kernels are compiled, missed ones before likely ones. False if there is none."""
        missing = (shape for shape in (*self._seen, *self.likely) if shape not in self._captured)
        shape = None if self._full else next(filter(self._kernels.is_ready, missing), None)
        if shape is None:
            return False
        self.capture(shape)
        return not self._full

    @torch.inference_mode()
    def capture(self, shape: Shape) -> None:
        if shape in self._captured or self._full:
            return
        try:
            fits = self._has_room(self._prepare(shape))
            if not fits and None not in self._captured.values():
                log.warning(f"some steps are not captured, because the largest one needs the memory: {_ADVICE}")
            self._captured[shape] = self._record(shape) if fits else None
            self._seen.pop(shape, None)
        except RuntimeError as error:  # torch's own error, or the driver's where a graph is made of what was captured
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            self._full = True
            log.warning(f"no memory is left for captured steps: {_ADVICE}")

    def _record(self, shape: Shape) -> Graph[Computed]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with _without_gc(), torch.cuda.graph(graph, pool=self._pool):
                step = self._forward(shape)
        finally:
            torch.cuda.set_stream(stream)  # torch does not restore it if a capture fails at its end
        return Graph(graph, step)


@contextmanager
def _without_gc() -> Iterator[None]:
    """No garbage collection: it could free graphs of an engine that is gone, which would spoil a capture.

    For one thread at a time, as all of capturing is.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def memory_taken(run: Callable[[], object], device: torch.device) -> int:
    """Bytes of GPU memory that `run` takes at its peak beyond what is in use, which are free again afterwards.

    Counted as torch asks the driver for them, with what lies unused between tensors. On a CPU, whose system lends more
    memory than there is, 0.
    """
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before


def round_up(value: int, buckets: list[int]) -> int | None:
    """The smallest bucket that holds `value`; None if none does."""
    return next((bucket for bucket in buckets if bucket >= value), None)
