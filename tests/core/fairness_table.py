"""Prints the tables of docs/results/scheduling.json: `python -m tests.core.fairness_table`."""

from __future__ import annotations

from tests.core.flooding import CPU_LIKE, GPU_LIKE, Machine, heavy_alone, serve

PROMPTS = (16, 32, 64, 128, 256, 600, 1024)


def row(machine: Machine, prompt: int) -> str:
    idle, flooded = serve(machine, prompt, flooded=False), serve(machine, prompt)
    times = f"{1000 * idle.p95:.1f} → {1000 * flooded.p95:.1f} ms: {flooded.p95 / idle.p95:.2f}"
    return f"| {prompt} | {times} | {flooded.worst / idle.p95:.2f} | {flooded.heavy_rate / heavy_alone(machine):.0%} |"


def main() -> None:
    for machine in (GPU_LIKE, CPU_LIKE):
        costs = f"{1000 * machine.step:g} ms a step and {1000 * machine.token:g} ms a token, {machine.slots} slots"
        print(f"{costs}; the heavy tenant alone: {heavy_alone(machine):,.0f} tokens/s")
        for prompt in PROMPTS:
            print(row(machine, prompt), flush=True)


if __name__ == "__main__":
    main()
