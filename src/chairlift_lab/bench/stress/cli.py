"""`chairlift bench stress`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench

FIGURES = (
    *("seconds", "steps", "requests", "tokens", "preempted", "swapped", "cached_tokens"),
    *("drafts", "accepted", "checked", "ties"),
)
COLUMNS = (
    Column("Round", "name"),
    *(Column(name.replace("_", " ").capitalize(), name, ",.0f") for name in FIGURES),
)


@bench(
    "stress",
    "chairlift bench stress --seconds 10",
    "chairlift bench stress --device cuda --seconds 180 --speculate ngram --json result.json",
    "chairlift bench stress --family qwen3_moe --batch-invariant",
    "chairlift bench stress --device cuda --dtype bfloat16 --quantization fp8 --kv-dtype fp8",
)
def bench_stress(
    note: Note,
    seconds: Annotated[float, typer.Option(help="Duration of all rounds together.")] = 20.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    family: Annotated[str, typer.Option(help="llama, mistral, qwen3, qwen3_moe or gemma2.")] = "llama",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    quantization: Annotated[str, typer.Option(help="Format of the weights: none, int4 or fp8 (GPU).")] = "none",
    kv_dtype: Annotated[str, typer.Option(help="Type of the KV cache: auto, or fp8 (GPU).")] = "auto",
    preemption: Annotated[str, typer.Option(help="Preemption modes, a round with each.")] = "recompute,swap",
    speculate: Annotated[str | None, typer.Option(help="ngram or layers:1.", show_default="no")] = None,
    draft_length: Annotated[
        int | None, typer.Option(help="Draft tokens per step with --speculate.", show_default="adaptive")
    ] = None,
    attention: Annotated[str, typer.Option(help="Attention backend: auto, or one by name.")] = "auto",
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="With bit-identical answers.")] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="On a GPU: capture steps and replay them.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
) -> BenchResult:
    """Random traffic with every invariant checked at every step; fails with the first violation.

    A small random model serves requests of every kind (greedy, sampled,
    parallel, beam search, structured, …) that come in bursts, quote each other,
    are cancelled or time out, with a KV cache that is far too small. The block
    accounting is checked after every step, every request must finish exactly
    once, and every token of a greedy request must be the argmax of the model on
    that sequence alone with plain attention (or tie with it within the rounding
    of --dtype).
    """
    from chairlift.config import EngineConfig
    from chairlift.engine.settings import resolve_machine
    from chairlift_lab.bench.stress.model import stress_model
    from chairlift_lab.bench.stress.run import stress, stress_config

    if seconds <= 0:
        raise InvalidParameter("seconds", f"must be above 0, got {seconds}")
    if quantization not in ("none", "int4", "fp8"):
        raise InvalidParameter("quantization", f"must be none, int4 or fp8, got {quantization!r}")
    if quantization == "fp8" and family == "qwen3_moe":
        raise InvalidParameter(
            "family", "rounded activations may choose other experts, so that tokens cannot be checked"
        )
    rounds = [name.strip() for name in preemption.split(",")]
    options = {
        "attention": attention,
        "batch_invariant": batch_invariant,
        "cuda_graphs": cuda_graphs,
        "kv_dtype": kv_dtype,
        "speculate": speculate,
        "draft_length": draft_length,
        "seed": seed,
    }
    machine = resolve_machine(EngineConfig(device=device, dtype=dtype))
    where = machine.device, machine.dtype
    loaded = stress_model(family, *where, quantization=quantization, batch_invariant=batch_invariant)
    configs = [stress_config(loaded, name, **options) for name in rounds]
    rows = [
        stress(loaded, config, seconds=seconds / len(rounds), seed=seed + number, note=note).row()
        for number, config in enumerate(configs)
    ]
    title = f"A random {family} under random traffic: all checks passed"
    request = {"family": family, "device": str(loaded.model.device), "dtype": dtype, "seconds": seconds} | options
    request["quantization"] = quantization
    return BenchResult(request, rows, [Table(title, COLUMNS, rows, _counts(rows))])


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"{row['name']}: {', '.join(f'{count:,} {name}' for name, count in row[key].items())}"
        for row in rows
        for key in ("kinds", "endings")
    )
