"""Static batching: a batch starts when it is full."""

from __future__ import annotations

from chairlift.core.policies.base import POLICIES, BatchPolicy


@POLICIES.register("static")
class StaticPolicy(BatchPolicy):
    """Waits for a full batch; the default delay of 10 s keeps the last requests from waiting forever."""

    name = "static"
    default_delay_ms = 10_000.0
