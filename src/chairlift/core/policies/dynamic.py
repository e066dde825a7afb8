"""Dynamic batching: a batch starts when it is full or its oldest request has waited for a moment."""

from __future__ import annotations

from chairlift.core.policies._batch import BatchPolicy
from chairlift.core.policies.base import POLICIES


@POLICIES.register("dynamic")
class DynamicPolicy(BatchPolicy):
    """Waits for a full batch, but no longer than 50 ms unless `max_delay_ms` says otherwise."""

    name = "dynamic"
    default_delay_ms = 50.0
