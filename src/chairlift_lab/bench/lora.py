"""Many LoRA adapters in one batch, against the base model alone."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.workload import TokenSource
from chairlift_lab.report.options import Count, Settings

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

PEFT_PREFIX = "base_model.model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings(Settings):
    """Lengths are in tokens."""

    requests: Annotated[Count, typer.Option(help="Requests that run at the same time.")] = 64
    prompt: Annotated[Count, typer.Option(help="Tokens of a prompt.")] = 32
    answer: Annotated[Count, typer.Option(help="Tokens generated per request.")] = 48
    rank: Annotated[Count, typer.Option(help="Rank of the adapters.")] = 16
    rounds: Annotated[Count, typer.Option(help="Rounds, in which all cases are measured one after the other.")] = 3
    seed: Annotated[int, at_least(0), typer.Option(help="The same seed gives the same requests.")] = 0


def write_adapters(folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, count: int) -> dict[str, Path]:
    """Random adapters of these modules, as PEFT writes them, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    paths = {}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
            tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = (0.02 * a).bfloat16()
            tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = (0.02 * b).bfloat16()
        path = paths[f"adapter-{number}"] = folder / f"{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, path / "adapter_model.safetensors")
    return paths


def run(engine: Engine, prompts: Sequence[Sequence[int]], names: Sequence[str | None], answer: int) -> float:
    """Output tokens per second of one request per prompt, all submitted at once."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for prompt, name in zip(prompts, names, strict=True):
        engine.submit(prompt, params, lora=name)
    while engine.has_work:
        engine.step()
        engine.check_alive()
    return len(prompts) * answer / (time.perf_counter() - start)


def compare_adapters(
    maker: EngineMaker, settings: LoraSettings, counts: Sequence[int], targets: Sequence[str], note: Note
) -> list[dict[str, Any]]:
    """A row for the base model and for each number of adapters, mixed with it: the median of all rounds."""
    from chairlift.models.adapters import AdapterFitting
    from chairlift.models.decoder import Decoder

    model = maker.loaded.model
    if not isinstance(model, Decoder):
        raise InvalidParameter("model", "has no adapters: it runs on the code of transformers")
    shapes = {
        name: shape for name, shape in AdapterFitting(model).shapes().items() if name.rpartition(".")[2] in targets
    }
    if not shapes:
        raise InvalidParameter("targets", f"the model has none of {', '.join(targets)}")
    tokens = TokenSource(maker.vocabulary(), f"lora {settings.seed}")
    prompts = [tokens.draw(settings.prompt) for _ in range(settings.requests)]
    options: dict[str, Any] = {"max_batch_requests": settings.requests, "prefix_caching": False}
    note("the base model")
    base = maker.start(**options)
    base.runner.capture_decodes([settings.requests])
    cases: dict[int, list[float]] = {count: [] for count in (0, *counts)}
    run(base.engine, prompts, [None] * len(prompts), 4)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_adapters(Path(folder), shapes, settings.rank, max(counts))
        note(f"{len(paths)} adapters")
        lora = {name: str(path) for name, path in paths.items()}
        mixed = maker.start(**options, lora=lora, max_loras=max(counts))
        mixed.runner.capture_decodes([settings.requests])
        run(mixed.engine, [prompts[0]] * len(paths), [*paths], 1)  # All are loaded before anything is measured.
        for number in range(settings.rounds):
            for count, speeds in cases.items():
                note(f"round {number + 1} of {settings.rounds}: {count} adapters")
                names = [None, *paths][: count + 1]
                chosen = [names[index % len(names)] for index in range(len(prompts))]
                engine = mixed.engine if count else base.engine
                speeds.append(run(engine, prompts, chosen, settings.answer))
        pool = mixed.engine.scheduler.adapters
        adapter_bytes = pool.num_bytes // max(1, len(pool.in_memory))
        mixed.engine.shut_down()
    rows = []
    for count, speeds in cases.items():
        ratios = [speed / alone for speed, alone in zip(speeds, cases[0], strict=True)]
        row = {"adapters": count, "output_tokens_per_s": median(speeds), "of_base": median(ratios)}
        rows.append(row | {"adapter_bytes": adapter_bytes if count else 0})
    return rows


COLUMNS = (
    Column("Adapters", lambda row: f"{row['adapters']}, and the base model" if row["adapters"] else "none"),
    Column("Output\ntokens/s", "output_tokens_per_s", ",.1f"),
    Column("Of the base\nmodel alone", "of_base", ".2f"),
    Column("MB per\nadapter", lambda row: f"{row['adapter_bytes'] / 1e6:.1f}"),
)


@bench("lora", "chairlift bench lora", "chairlift bench lora --targets q_proj,k_proj,v_proj,o_proj --rank 64")
def bench_lora(
    engine: EngineOptions,
    settings: LoraSettings,
    note: Note,
    counts: Annotated[str, typer.Option(help="Numbers of adapters to measure, separated by commas.")] = "1,8,64",
    targets: Annotated[
        str, typer.Option(help="Adapted modules, by their last names; the default is that of PEFT for Llama.")
    ] = "q_proj,v_proj",
) -> BenchResult:
    """Requests of many LoRA adapters and of the base model in one batch, against the base model alone.

    All cases run in one process, one after the other in each round. The ratio is the median of the rounds' ratios.
    """
    numbers = [int(number) for number in counts.split(",") if number.strip().isdigit() and int(number) > 0]
    if not numbers or len(numbers) != len(counts.split(",")):
        raise InvalidParameter("counts", f"must be numbers separated by commas, got {counts!r:.100}")
    maker = EngineMaker.from_options(engine, note)
    rows = compare_adapters(maker, settings, numbers, [name.strip() for name in targets.split(",")], note)
    title = f"Rank {settings.rank} on {targets}, {settings.requests} requests"
    chosen = asdict(settings) | {"targets": targets, "model": engine.model}
    return BenchResult(chosen, rows, [Table(title, COLUMNS, rows)])
