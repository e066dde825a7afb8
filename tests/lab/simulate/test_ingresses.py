"""Several ingresses with routers of their own, in simulation."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.cluster.routing.router import Router
from chairlift.core.cost_model import StepShape
from chairlift.core.targets import Targets
from chairlift_lab.planning.prediction import ReplicaSettings
from chairlift_lab.simulator.outcome import Arrival, figures
from chairlift_lab.simulator.simulation import Ingresses, simulate
from chairlift_lab.simulator.step_cost import LinearCost


class Linear(LinearCost):
    """A step takes 10 ms, plus 0.1 ms per token."""

    seconds_per_position = 0.0

    def predict(self, shape: StepShape) -> float:
        return 0.010 + 0.0001 * shape.tokens


def arrivals() -> list[Arrival]:
    """Requests of 40 tenants, each with a prefix of its own."""
    source = random.Random(3)
    tenants = [source.randrange(40) for _ in range(600)]
    return [Arrival(0.02 * index, [tenant] * 320 + [1000 + index] * 64, 10) for index, tenant in enumerate(tenants)]


def run(router: Router) -> dict[str, float]:
    engine = ReplicaSettings(num_blocks=2000, prefix_caching=True)
    outcome = simulate(arrivals(), [engine.make(Linear()) for _ in range(8)], router)
    assert all(router.loads[replica] == router.loads.held_tokens(replica) == 0 for replica in router.loads)
    found = figures(outcome, Targets())
    return {name: found[name] for name in ("requests", "cached_share", "ttft_p50_ms", "e2e_p99_ms")}


@pytest.mark.parametrize("policy", ["prefix-affine", "least-loaded", "round-robin"])
def test_one_ingress_is_the_router_itself(policy: str) -> None:
    assert run(Ingresses(policy, 1)) == run(Router(policy))


def test_ingresses_that_take_turns_lose_hits_that_those_of_tenants_keep() -> None:
    alone, turns, tenants = (
        run(router)["cached_share"]
        for router in (
            Router("prefix-affine"),
            Ingresses("prefix-affine", 8),
            Ingresses("prefix-affine", 8, by_tenant=True),
        )
    )
    assert turns < tenants < alone


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--ingresses", "0"], "--ingresses"),
        (["--ingresses", "2", "--ingress-by", "luck"], "--ingress-by"),
        (["--ingresses", "2", "--ingress-by", "tenant"], "--ingress-by"),
    ],
)
def test_wrong_options_are_refused(options: list[str], name: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--requests", "5", *options])
    assert result.exit_code == 2
    assert name in result.output
