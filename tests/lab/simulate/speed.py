"""Measures the speed of the simulator: `python -m tests.lab.simulate.speed [TRACE ...]`."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift.cluster.routing.router import Router
from chairlift.core.cost_model import StepShape
from chairlift_lab.load.trace_files import load_trace
from chairlift_lab.planning.machine import model_shape, read_config
from chairlift_lab.planning.prediction import ReplicaSettings, trace_arrivals
from chairlift_lab.simulator.outcome import Arrival, SimulationOutcome
from chairlift_lab.simulator.simulation import simulate
from chairlift_lab.simulator.step_cost import Roofline, device_named

COST = Roofline(model_shape(read_config("llama3-8b"), "bfloat16", "bfloat16"), device_named("h200"))
PROMPTS = (16, 512)
BEGINNINGS = 8  # shared system prompts ...
COMMON = 256  # ... of this many tokens
REPEATS = 3  # the fastest counts


def traffic(running: int, output: int, count: int, *, times: float = 1.0, shared: bool = False) -> list[Arrival]:
    """Traffic that keeps about `running` requests in the batch, each generating `output` tokens.
    `times`: multiplies the arrival rate (for several replicas, or for overload). `shared`: each prompt starts with
    one of a few system prompts."""
    prompt = round(sum(PROMPTS) / 2 * running / output)  # tokens in a step
    context = running * (sum(PROMPTS) // 2 + output // 2)
    step = COST.predict(StepShape(running, prompt, context, prompt * PROMPTS[1] // 2, running))
    rng, at, found = random.Random(0), 0.0, []
    for index in range(count):
        prompt, n_out = [index] * rng.randint(*PROMPTS), rng.randint(output // 2, output * 3 // 2)
        if shared:
            prompt = [2**31 + index % BEGINNINGS] * COMMON + prompt
        found.append(Arrival(at, prompt, n_out))
        at += rng.expovariate(times * running / (step * output))
    return found


def report(name: str, coming: Sequence[Arrival], *, replicas: int = 1, **settings: Any) -> None:
    made = ReplicaSettings(**({"num_blocks": 100_000, "slots": 1024} | settings))
    fastest, outcome = float("inf"), SimulationOutcome()
    for _ in range(REPEATS):
        gc.collect()
        begun = time.process_time()
        outcome = simulate(coming, [made.make(COST) for _ in range(replicas)], Router("least-loaded"))
        fastest = min(fastest, time.process_time() - begun)
    batch = sum(arrival.n_out for arrival in coming) / outcome.steps
    rates = f"{outcome.steps / fastest:10,.0f} steps/s {len(coming) / fastest:8,.0f} requests/s"
    print(f"{name:44} {rates} {batch:6.1f} tokens a step {outcome.preemptions:4} preemptions", flush=True)


def main() -> None:
    for running, output in ((1, 256), (10, 256), (32, 256), (32, 1024), (128, 1024), (128, 256), (256, 256)):
        report(f"{running} running, {output} tokens", traffic(running, output, 5000))
    report("64 replicas, 32 running each", traffic(32, 256, 10_000, times=64), replicas=64)
    report("twice what 256 slots can take", traffic(256, 256, 5000, times=2), slots=256)
    report("128 running, memory for 90", traffic(128, 256, 2000), num_blocks=3000)
    report("twice what memory can take", traffic(128, 256, 2000, times=2), num_blocks=4500)
    report("128 running, prompts in chunks of 256", traffic(128, 256, 2000), slots=256, max_prefill_tokens=256)
    for policy in ("static", "dynamic"):
        report(f"{policy}, 64 slots", traffic(32, 256, 1000), policy=policy, slots=64)
    report("order shortest", traffic(32, 256, 500), order="shortest")
    for running, output in ((10, 256), (32, 256), (128, 256)):
        name = f"{running} running, {output} tokens, prefix caching"
        report(name, traffic(running, output, 2000), prefix_caching=True)
        report(f"{running} running, shared prefixes", traffic(running, output, 2000, shared=True), prefix_caching=True)
    report("128 running, the prefix cache full", traffic(128, 256, 2000), prefix_caching=True, num_blocks=10_000)
    for path in sys.argv[1:]:
        entries = load_trace(Path(path))[:4000]
        caching = any(entry.blocks for entry in entries)
        report(Path(path).name, list(trace_arrivals(entries)), prefix_caching=caching, replicas=4)


if __name__ == "__main__":
    main()
