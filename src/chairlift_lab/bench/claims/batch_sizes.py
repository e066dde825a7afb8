"""Compute use of one request, and throughput by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from chairlift.progress import Note
from chairlift_lab.common.engine_run import measure_engine
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.floor import ceilings_for
from chairlift_lab.common.measure import percentile
from chairlift_lab.common.workload import LengthRange, make_workload


@dataclass(frozen=True, slots=True)
class ComputeShare:
    """Arithmetic that one decoding request gets done, and the most that matrix products get done here, in FLOP/s."""

    achieved: float
    ceiling: float

    @property
    def share(self) -> float:
        return self.achieved / self.ceiling


def measure_compute_share(maker: EngineMaker, *, tokens: int = 24, note: Note = lambda text: None) -> ComputeShare:
    """Two operations per weight and token; attention over so short a text is negligible."""
    note("one request alone")
    length = LengthRange(tokens, tokens)
    workload = make_workload(maker.vocabulary(), requests=1, prompt_len=length, output_len=length, seed=0)
    measured = measure_engine(maker.engine(max_batch_requests=1, prefix_caching=False), workload, lambda tokens: None)
    gaps = [later - earlier for earlier, later in pairwise(measured.token_times[0])]
    note("the largest matrix products")
    ceiling = ceilings_for(maker.loaded.model).flops_per_second
    return ComputeShare(2 * maker.num_parameters() / percentile(gaps, 50), ceiling)


@dataclass(frozen=True, slots=True)
class BatchSizePoint:
    requests: int
    tokens_per_s: float


def compare_batch_sizes(
    maker: EngineMaker,
    *,
    sizes: Sequence[int] = (1, 4, 16, 64),
    prompt: int = 32,
    output: int = 24,
    note: Note = lambda text: None,
) -> list[BatchSizePoint]:
    """The throughput of full batches. Small batches get fewer requests: a rate does not depend on the duration."""
    points = []
    for count in sizes:
        note(f"{count} requests at a time")
        workload = make_workload(
            maker.vocabulary(),
            requests=max(count, 3),
            prompt_len=LengthRange(prompt, prompt),
            output_len=LengthRange(output, output),
            seed=0,
        )
        engine = maker.engine(max_batch_requests=count, prefix_caching=False)
        row = measure_engine(engine, workload, lambda tokens: None).row("")
        points.append(BatchSizePoint(count, row["output_tokens_per_s"]))
    return points
