"""Dynamic batching: a batch starts when it is full or after a short delay."""

from __future__ import annotations

from chairlift.core.policies.base import POLICIES, BatchPolicy


@POLICIES.register("dynamic")
class DynamicPolicy(BatchPolicy):
    """Waits for a full batch for at most `max_delay_ms`, by default 50 ms."""

    name = "dynamic"
    default_delay_ms = 50.0
