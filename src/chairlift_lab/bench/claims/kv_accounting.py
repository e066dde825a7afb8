"""KV memory accounting: waste of a paged cache, shared prefixes, and padding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.core.events import StepDone
from chairlift.core.sampling.params import SamplingParams
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.lengths import SpreadLengths

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class KVWaste:
    """The share of the reserved memory that holds no token, averaged over all steps of a workload."""

    paged: float
    contiguous: float  # if each request reserved the longest sequence there may be


def measure_kv_waste(
    maker: EngineMaker, *, requests: int = 32, prompt: int = 161, output: int = 338, max_len: int = 2048
) -> KVWaste:
    """Lengths like those of recorded chats (the defaults are the means of ShareGPT in the PagedAttention paper)."""
    engine = maker.engine(max_batch_requests=16, max_model_len=max_len, prefix_caching=False)
    source = random.Random(0)
    prompts, outputs = (SpreadLengths(mean, 1.0, max_len // 2 - 1) for mean in (prompt, output))
    for _ in range(requests):
        _submit(engine, [source.randrange(10, 1000) for _ in range(prompts.draw(source))], outputs.draw(source))
    tokens = in_blocks = reserved = 0
    scheduler = engine.scheduler
    while engine.has_work:
        engine.step()
        for request in scheduler.running:
            tokens += request.num_computed
            in_blocks += len(scheduler.kv.table(request)) * scheduler.kv.block_size
            reserved += max_len
    return KVWaste(paged=1 - tokens / in_blocks, contiguous=1 - tokens / reserved)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests with a common start, with and without sharing it."""

    prefix_blocks: int  # that the common start fills
    shared_blocks: int  # most in use while three of them run
    separate_blocks: int
    shared_batch: int  # most requests in a step, where memory holds `separate_batch` of them without sharing
    separate_batch: int


def measure_shared_prefix(maker: EngineMaker, *, prefix: int = 1000, own: int = 16, crowd: int = 12) -> SharedPrefix:
    """Three requests in ample memory, then a crowd of them in memory for three."""
    block_size = maker.config().block_size
    per_request = -(-(prefix + 2 * own) // block_size)
    memory = maker.kv_memory(3 * per_request)
    few, many = _share(maker, 3, prefix, own, None), _share(maker, crowd, prefix, own, memory)
    return SharedPrefix(prefix // block_size, few[True][0], few[False][0], many[True][1], many[False][1])


def _share(
    maker: EngineMaker, requests: int, prefix: int, own: int, kv_memory: int | None
) -> dict[bool, tuple[int, int]]:
    """By whether prefixes are cached: the most blocks in use, and the most requests in a step."""
    found = {}
    for caching in (False, True):
        options: dict[str, Any] = {"kv_memory": kv_memory} if kv_memory else {}
        engine = maker.engine(prefix_caching=caching, max_batch_requests=requests, max_batch_tokens=2048, **options)
        common = [10 + i % 900 for i in range(prefix)]
        for index in range(requests):
            _submit(engine, common + [10 + index] * own, own)
        steps = _steps_to_end(engine)
        found[caching] = (max(step.used_blocks for step in steps), max(step.requests for step in steps))
    return found


def measure_joining_padding(maker: EngineMaker, attention: str, *, prompt: int = 100, batch: int = 8) -> int:
    """Padding in the step in which a prompt becomes the last of a batch whose others decode."""
    engine = maker.engine(attention=attention, max_batch_requests=batch, prefix_caching=False, max_batch_tokens=512)
    for index in range(batch - 1):
        _submit(engine, [10 + index], 8)
    engine.step()
    _submit(engine, [50 + i for i in range(prompt)], 8)
    (joined,) = [step for step in _steps_to_end(engine) if step.prefill_tokens == prompt]
    assert joined.requests == batch
    return joined.padding_tokens


def _submit(engine: Engine, prompt: Sequence[int], output: int) -> None:
    engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False))


def _steps_to_end(engine: Engine) -> list[StepDone]:
    steps = []
    while engine.has_work:
        steps += [event for event in engine.step() if isinstance(event, StepDone)]
    return steps
