"""Images in prompts: what is encoded when, what is kept, and that every request ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from chairlift.core.encoder_cache import EncoderCache
from chairlift.core.images import PromptImage, image_key
from chairlift.core.integrity import check_accounting, check_plan, check_shared_prefixes
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.core.scheduler.scheduler import Scheduler
from tests.core.driving import make_request, make_scheduler, run_plan, run_to_end, step


@dataclass
class Encoder:
    """What a runner does with the plans of a scheduler's cache."""

    bad: set[bytes] = field(default_factory=set)  # digests of images that cannot be encoded
    shares: dict[bytes, float] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        for key in plan.encoding.drops:
            self.shares.pop(key, None)
        failed = {}
        for work in plan.encoding.works:
            assert work.image.data is not None
            self.shares[work.key] = work.share
            if work.image.digest in self.bad and work.share >= 1:
                failed[work.key] = "it is bad"
                del self.shares[work.key]
        for chunk in plan.chunks:
            for image in chunk.request.images:
                if image.pieces(chunk.start, chunk.end):
                    key = image_key(chunk.request.salt, image)
                    assert self.shares.get(key, 0) >= 1 or key in failed, "it is read before it is encoded"
                    if image.whole:
                        assert chunk.end >= image.end, "it is divided"
        result = run_plan(plan)
        return StepResult(plan, result.tokens, result.logprobs, accepted=result.accepted, bad_images=failed)


def image(number: int, start: int, rows: int, work: int = 0, *, whole: bool = False) -> PromptImage:
    digest = number.to_bytes(32, "big")
    return PromptImage(digest, ((start, start + rows),), work or 4 * rows, whole, data=object())


def with_images(capacity: int, **options: object) -> Scheduler:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    scheduler.state.images = EncoderCache(capacity)
    return scheduler


def cache_of(scheduler: Scheduler) -> EncoderCache:
    assert scheduler.images is not None
    return scheduler.images


def random_request(name: str, rng: random.Random, *, whole: bool) -> Request:
    tokens, images = list[int](), list[PromptImage]()
    for _ in range(rng.randrange(4)):
        tokens += [7] * rng.randrange(9)
        number = rng.randrange(4)
        images.append(image(number, len(tokens), 3 + 2 * number, whole=whole))
        tokens += [1] * images[-1].rows
    tokens += [8] * rng.randrange(1, 9)
    return make_request(name, tokens, rng.randrange(1, 5), images=tuple(images), salt=rng.choice(["", "other"]))


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_and_reads_what_is_encoded(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = with_images(
        rng.choice((9, 14, 60)),
        num_blocks=rng.choice((16, 60)),
        max_batch_tokens=rng.choice((5, 16, 64)),
        max_batch_requests=rng.choice((1, 3, 8)),
        order=rng.choice(("fcfs", "shortest", "fair")),
        prefix_caching=rng.random() < 0.7,
    )
    cache, encoder = cache_of(scheduler), Encoder({(1).to_bytes(32, "big")} if seed % 3 == 0 else set())
    waiting = [random_request(f"r{i}", rng, whole=seed % 4 == 1) for i in range(12)]
    every, turns = list(waiting), 0
    while waiting or scheduler.has_work:
        if waiting and rng.random() < 0.5:
            scheduler.submit(waiting.pop(), turns)
        if rng.random() < 0.1:
            scheduler.finish(rng.choice(every).id, Ending(FinishReason.CANCELLED), turns)
        plan = scheduler.schedule(turns)
        check_accounting(scheduler)
        check_plan(scheduler, plan)
        if rng.random() < 0.1:
            if plan and rng.random() < 0.5:
                encoder.run(plan)
            scheduler.abandon(plan, turns)
        elif plan:
            scheduler.apply(encoder.run(plan), turns)
        cache.check()
        check_accounting(scheduler)
        check_shared_prefixes(scheduler)
        turns += 1
        assert turns < 3000, "the workload does not end"
    assert all(request.status is Status.FINISHED for request in every)
    assert not cache.open
    assert not cache.is_left_over
    assert all(share >= 1 for share in encoder.shares.values())


def test_the_data_of_images_is_not_kept_with_what_was_encoded() -> None:
    scheduler = with_images(100)
    scheduler.submit(make_request("a", [1] * 8, images=(image(1, 0, 7),)), 0)
    run_to_end(scheduler)
    kept = [getattr(entry, name) for entry in cache_of(scheduler)._entries.values() for name in entry.__slots__]
    assert kept
    assert not any(isinstance(value, PromptImage) for value in kept)


def test_work_that_no_request_wants_any_more_is_given_up() -> None:
    scheduler = with_images(100, max_batch_tokens=8)
    scheduler.submit(make_request("a", [1] * 8, images=(image(1, 0, 7, work=100),)), 0)
    begun = step(scheduler).encoding.works
    assert begun[0].share < 1
    scheduler.finish("a", Ending(FinishReason.CANCELLED), 0)
    assert scheduler.has_work
    assert step(scheduler).encoding.drops == (begun[0].key,)
    assert not scheduler.has_work
