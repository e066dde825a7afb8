"""How fast the simulator is: `python -m tests.simulate.speed [TRACE ...]`. No test, since it is about time."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chairlift.bench.model_shape import model_shape, read_config
from chairlift.bench.simulation import ReplicaSettings, trace_arrivals
from chairlift.bench.traces import load_trace
from chairlift.core.cost_model import StepShape
from chairlift.simulate.devices import device_named
from chairlift.simulate.records import Arrival
from chairlift.simulate.roofline import Roofline
from chairlift.simulate.router import make_router
from chairlift.simulate.run import simulate

COST = Roofline(model_shape(read_config("llama3-8b"), "bfloat16", 2)[0], device_named("h200"))


PROMPTS = (16, 512)


def traffic(on_board: int, output: int, count: int) -> list[Arrival]:
    """So many on board at a time, more or less: in every step a part of one comes, and generates `output` tokens."""
    prompt = round(sum(PROMPTS) / 2 * on_board / output)  # tokens in a step
    context = on_board * (sum(PROMPTS) // 2 + output // 2)
    step = COST.predict(StepShape(on_board, prompt, context, prompt * PROMPTS[1] // 2, on_board))
    rng, at, found = random.Random(0), 0.0, []
    for index in range(count):
        found.append(Arrival(at, [index] * rng.randint(*PROMPTS), rng.randint(output // 2, output * 3 // 2)))
        at += rng.expovariate(on_board / (step * output))
    return found


def report(name: str, coming: Sequence[Arrival], *, caching: bool, replicas: int = 1) -> None:
    settings = ReplicaSettings(num_blocks=100_000, seats=1024, prefix_caching=caching)
    begun = time.process_time()
    outcome = simulate(coming, [settings.make(COST) for _ in range(replicas)], make_router("least-loaded"))
    seconds = time.process_time() - begun
    batch = sum(arrival.n_out for arrival in coming) / outcome.steps
    rates = (
        f"{outcome.steps / seconds:10,.0f} steps/s {len(coming) / seconds:8,.0f} requests/s {batch:6.1f} tokens a step"
    )
    print(f"{name:32} {rates}  prefix caching {'on' if caching else 'off'}", flush=True)


def main() -> None:
    for caching in (False, True):
        for on_board, output in ((1, 256), (10, 256), (32, 256), (32, 1024), (128, 1024), (128, 256), (256, 256)):
            report(f"{on_board} on board, {output} tokens", traffic(on_board, output, 2000), caching=caching)
    for path in sys.argv[1:]:
        entries = load_trace(Path(path))[:4000]
        caching = any(entry.blocks for entry in entries)
        report(Path(path).name, list(trace_arrivals(entries)), caching=caching, replicas=4)


if __name__ == "__main__":
    main()
