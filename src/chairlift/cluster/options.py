"""The options of a fleet of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from chairlift.cluster.autoscaling import AutoscalingSettings
from chairlift.cluster.routing.policies import ROUTERS
from chairlift.errors import InvalidParameter
from chairlift.options import above, at_least, between, check_options, option, parse_bytes

_DEFAULTS = AutoscalingSettings()
fleet_option, scaling_option = partial(option, group="Fleet"), partial(option, group="Autoscaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    replicas: int = fleet_option(
        1,
        common=True,
        help="Replicas of the server, each with its own engine; with autoscaling, at the start.",
        check=at_least(1),
    )
    router: str = fleet_option(
        "prefix-affine", common=True, help="How a replica is chosen for a request.", choices=ROUTERS.names
    )
    ingresses: int = fleet_option(
        1, help="Processes that accept requests and relay them, all on the same port.", check=between(1, 64)
    )
    ingress_location: str = fleet_option(
        "head",
        help="Run ingresses on the head node of the Ray cluster, or one on each of any nodes, behind a load balancer.",
        choices=("head", "any"),
    )
    replica_cpus: float = fleet_option(1.0, help="CPU cores that Ray reserves for a replica.", check=at_least(0))
    replica_gpus: float = fleet_option(
        0.0, common=True, help="GPUs that Ray reserves for a replica.", check=at_least(0)
    )
    replica_memory: int | str | None = fleet_option(
        None, help="Memory that Ray reserves for a replica.", metavar="SIZE", check=parse_bytes, default_text="nothing"
    )
    max_replicas: int | None = scaling_option(
        None, common=True, help="Autoscale up to this many replicas.", check=at_least(1), default_text="no scaling"
    )
    min_replicas: int | None = scaling_option(
        None,
        help="Autoscale down to this many; with 0, a request to an idle fleet waits for a cold start.",
        check=at_least(0),
        default_text="as --replicas",
    )
    target_ttft: float = scaling_option(
        _DEFAULTS.target_ttft, help="Seconds to the first token to keep.", check=above(0)
    )
    target_tpot: float | None = scaling_option(
        None, help="Seconds per output token to keep.", check=above(0), default_text="any"
    )
    target_used: float = scaling_option(
        _DEFAULTS.target_used, help="Share of KV blocks in use at which to add replicas.", check=above(0)
    )
    cold_start: float = scaling_option(
        _DEFAULTS.cold_start, help="Seconds until a new replica answers.", check=at_least(0)
    )
    down_delay: float = scaling_option(
        _DEFAULTS.down_delay,
        help="Seconds for which fewer replicas must suffice before any is removed.",
        check=at_least(0),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_replicas is None and self.min_replicas is not None:
            raise InvalidParameter("min_replicas", "needs max_replicas")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidParameter("max_replicas", f"must be at least replicas ({self.replicas})")
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            raise InvalidParameter("min_replicas", f"must be at most replicas ({self.replicas})")

    def autoscaling(self) -> AutoscalingSettings | None:
        """The settings of the autoscaler; None if the number of replicas is fixed."""
        if self.max_replicas is None:
            return None
        return AutoscalingSettings(
            min_replicas=self.replicas if self.min_replicas is None else self.min_replicas,
            max_replicas=self.max_replicas,
            target_ttft=self.target_ttft,
            target_used=self.target_used,
            target_tpot=self.target_tpot,
            cold_start=self.cold_start,
            down_delay=self.down_delay,
        )
