"""Ray Serve's autoscaling policy that asks our autoscaler, which the simulator runs too.

Ray Serve copies this module by value to its controller, where the policy is called every 0.1 s.
"""

from __future__ import annotations

import time
from typing import Any

from chairlift.cluster.autoscaling import Autoscaler, AutoscalingSettings, FleetObservation, fleet_wait

INTERVAL = 1.0  # seconds between decisions


class FleetScaling:
    def __init__(self, **settings: Any) -> None:
        self._autoscaler = Autoscaler(AutoscalingSettings(**settings))
        self._next = 0.0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Ray Serve's AutoscalingContext; returns the number of replicas to have, and no state."""
        now = time.monotonic()
        if now < self._next:
            return context.target_num_replicas, {}
        self._next = now + INTERVAL
        return self._autoscaler.desired(observe(context), now), {}


def observe(context: Any) -> FleetObservation:
    reported: dict[str, dict[Any, float]] = context.aggregated_metrics or {}

    def of_all(name: str) -> list[float]:
        return list(reported.get(name, {}).values())

    tpots = [value for value in of_all("tpot") if value]
    used = of_all("used")
    return FleetObservation(
        ready=len(context.running_replicas),
        wait=fleet_wait(of_all("wait")),
        used=sum(used) / len(used) if used else 0.0,
        tpot=sum(tpots) / len(tpots) if tpots else None,
        open_requests=round(sum(of_all("open")) + context.total_queued_requests),
    )
