"""Every step computes something while a request is running."""

from __future__ import annotations

from tests.core.driving import make_request, make_scheduler, step


def test_a_batch_continues_while_a_request_with_a_better_claim_waits_and_memory_is_short() -> None:
    """`b` needs the blocks that the finished `a` holds; `c` has a better claim, but no request joins a running
    batch."""
    scheduler = make_scheduler(
        num_blocks=12,
        block_size=1,
        max_batch_tokens=8,
        max_prefill_tokens=2,
        max_batch_requests=2,
        policy="static",
        order="priority",
        prefix_caching=False,
    )
    scheduler.submit(make_request("a", 1, new=3), 0.0)
    scheduler.submit(make_request("b", 10, new=2), 0.0)
    step(scheduler)
    scheduler.submit(make_request("c", 2, new=1, priority=-1), 0.0)
    scheduler.expect_no_more()
    for _ in range(40):
        if scheduler.has_work:
            assert step(scheduler)
    assert not scheduler.has_work
