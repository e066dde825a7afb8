"""`chairlift bench stress`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import JsonOptions, show_table, watch

if TYPE_CHECKING:
    from chairlift.lab.bench.stress.run import StressFigures

_FIGURES = (
    *("seconds", "steps", "requests", "tokens", "preempted", "swapped", "cached_tokens"),
    *("drafts", "accepted", "checked", "ties"),
)


@bench(
    "stress",
    "chairlift bench stress --seconds 10",
    "chairlift bench stress --device cuda --seconds 180 --speculate ngram --json result.json",
    "chairlift bench stress --family qwen3_moe --batch-invariant",
)
def bench_stress(
    report: JsonOptions,
    seconds: Annotated[float, typer.Option(help="Of traffic, for all rounds together.")] = 20.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    family: Annotated[str, typer.Option(help="llama, mistral, qwen3, qwen3_moe or gemma2.")] = "llama",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    preemption: Annotated[str, typer.Option(help="A round with each of these.")] = "recompute,swap",
    speculate: Annotated[str | None, typer.Option(help="ngram or layers:1.", show_default="no")] = None,
    draft_length: Annotated[
        int | None, typer.Option(help="Guesses at a time with --speculate.", show_default="as many as pay")
    ] = None,
    attention: Annotated[str, typer.Option(help="Attention backend: auto, or one by name.")] = "auto",
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="With bit-identical answers.")] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="On a GPU: capture steps and replay them.")] = True,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Random traffic with every invariant checked at every step: it goes well, or says what went wrong.

    A small random model serves requests of every kind (greedy, drawn,
    several at once, beams, structured, …) that come in bursts, quote each other,
    are cancelled or run out of time, in a KV cache that is far too small. After
    every step the books are checked, every request must end exactly once, and
    every token of greedy requests must be the one that the model gives to that
    sequence by itself, computed by the plain formula (or tie with it, within what
    rounding to --dtype does).
    """
    from chairlift.config import EngineConfig
    from chairlift.engine.machine_defaults import torch_device, torch_dtype
    from chairlift.lab.bench.stress.model import stress_model
    from chairlift.lab.bench.stress.run import stress, stress_config

    if seconds <= 0:
        raise InvalidParameter("seconds", f"must be above 0, got {seconds}")
    rounds = [name.strip() for name in preemption.split(",")]
    options = {
        "attention": attention,
        "batch_invariant": batch_invariant,
        "cuda_graphs": cuda_graphs,
        "speculate": speculate,
        "draft_length": draft_length,
        "seed": seed,
    }
    report.check()
    machine = EngineConfig(device=device, dtype=dtype)
    loaded = stress_model(family, torch_device(machine), torch_dtype(machine), batch_invariant=batch_invariant)
    configs = [stress_config(loaded, name, **options) for name in rounds]
    with watch(enabled=not quiet) as note:
        found = [
            stress(loaded, config, seconds=seconds / len(rounds), seed=seed + number, note=note)
            for number, config in enumerate(configs)
        ]
    show(family, found)
    asked = {"family": family, "device": str(loaded.model.device), "dtype": dtype, "seconds": seconds} | options
    report.write("stress", asked, [figures.row() for figures in found])


def show(family: str, found: list[StressFigures]) -> None:
    show_table(
        f"A random {family} under random traffic: nothing went wrong",
        ["Round", *(name.replace("_", " ").capitalize() for name in _FIGURES)],
        [[figures.name, *(f"{getattr(figures, name):,.0f}" for name in _FIGURES)] for figures in found],
        "\n".join(
            f"{figures.name}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}"
            for figures in found
            for counts in (figures.kinds, figures.endings)
        ),
    )
