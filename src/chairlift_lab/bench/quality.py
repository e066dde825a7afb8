"""The cost of lossy options against float32: perplexity, and how often greedy decoding picks the same token."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.config import EngineConfig
from chairlift.core.plan import StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.loading.resolve import resolve_model
from chairlift.options import format_bytes, read_text
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import whole_chunk
from chairlift_lab.common.timing import in_inference_mode
from chairlift_lab.common.workload import QUALITY_TEXTS
from chairlift_lab.report.options import Plot, ReportOptions, picture

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.engine.startup import StartedEngine

FLOAT32 = {"dtype": "float32", "quantization": "none", "kv_dtype": "float32"}
CPU_MODES: Mapping[str, Mapping[str, str]] = {
    "float32": FLOAT32,
    "float32, KV bfloat16": FLOAT32 | {"kv_dtype": "bfloat16"},
    "float32, KV int8": FLOAT32 | {"kv_dtype": "int8"},
    "int8, KV float32": {"quantization": "int8", "kv_dtype": "float32"},
    "int8, KV bfloat16": {"quantization": "int8", "kv_dtype": "bfloat16"},
    "int8, KV int8": {"quantization": "int8", "kv_dtype": "int8"},
    "int4, KV float32": {"quantization": "int4", "kv_dtype": "float32"},
    "int4, KV bfloat16": {"quantization": "int4", "kv_dtype": "bfloat16"},
    "as stored, KV float32": {"quantization": "checkpoint", "kv_dtype": "float32"},
    "as stored, KV bfloat16": {"quantization": "checkpoint", "kv_dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
}
GPU_MODES: Mapping[str, Mapping[str, str]] = {
    "float32": FLOAT32,
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV fp8": {"dtype": "bfloat16", "kv_dtype": "fp8"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "fp8, KV fp8": {"dtype": "bfloat16", "quantization": "fp8", "kv_dtype": "fp8"},
}
LOGIT_ROWS = 64  # rows whose logits are held at a time
PIECE = 1024  # tokens of a text that are scored at once; longer texts are cut


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of every token of all texts but the first of each."""

    losses: Tensor  # [N] negative log probability of the actual token
    likeliest: Tensor  # [N] the token that greedy decoding would take

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.double().mean()))

    def standard_error(self, reference: Scores) -> float:
        """The standard error of the mean difference of losses, which is the relative change of the perplexity."""
        return float((self.losses.double() - reference.losses.double()).std(correction=0)) / math.sqrt(len(self.losses))


def modes_on(device: str) -> Mapping[str, Mapping[str, str]]:
    """The modes that a device can run: their options by name."""
    from chairlift.engine.settings import resolve_machine

    return CPU_MODES if resolve_machine(EngineConfig(device=device)).device.type == "cpu" else GPU_MODES


def measure_quality(
    model: str, modes: Sequence[str], note: Note, *, texts: Sequence[str] = QUALITY_TEXTS, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Score every mode on the same texts. float32 is the reference and always comes first, even if not in `modes`."""
    import torch

    from chairlift.engine.startup import load_model, start_engine

    rows: list[dict[str, Any]] = []
    reference: Scores | None = None
    for mode in ["float32", *(mode for mode in modes if mode != "float32")]:
        note(f"{mode}: loading")
        options: dict[str, Any] = {"device": device, "kv_memory": "256MiB", "max_batch_requests": 1}
        options["weight_cache"] = "off"  # One look at each is enough.
        config = EngineConfig(**(options | dict(modes_on(device)[mode])))
        loaded = load_model(model, config, progress=False)
        started = start_engine(loaded, config)
        parts = []
        start = loaded.tokenizer.encode("")  # special tokens with which prompts begin
        pieces = [piece for text in texts for piece in cut(loaded.tokenizer.encode(text), start)]
        for index, piece in enumerate(pieces):
            note(f"{mode}: text {index + 1} of {len(pieces)}")
            parts.append(score(started, piece))
        scores = Scores(torch.cat([part.losses for part in parts]), torch.cat([part.likeliest for part in parts]))
        reference = reference or scores
        rows.append(
            {
                "name": mode,
                "perplexity": scores.perplexity,
                "perplexity_change": scores.perplexity / reference.perplexity - 1,
                "standard_error": scores.standard_error(reference),  # The differences of single tokens decide it.
                "greedy_agreement": float((scores.likeliest == reference.likeliest).double().mean()),
                "weight_bytes": started.memory.weight_bytes,
                "kv_bytes_per_token": started.memory.bytes_per_token,
            }
        )
        del loaded, started  # The next model is loaded later.
        gc.collect()
    return rows


def measure_block_types(
    model: str, kinds: str, note: Note, *, texts: Sequence[str] = QUALITY_TEXTS
) -> list[dict[str, Any]]:
    """Round a GGUF model to each type of blocks; compare our products with those of the dequantized weights."""
    from chairlift_lab.make_model import parse_kinds, requantize

    chosen, source = parse_kinds(kinds), resolve_model(model)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in chosen:
            path = Path(folder) / f"{kind}.gguf"
            requantize(source, kind, path, note)
            _, stored = measure_quality(str(path), ["as stored, KV float32"], note, texts=texts)
            rows.append(stored | {"name": kind})
            path.unlink()
    return rows


def text_to_score(path: Path) -> str:
    """The text of a file, which must have some."""
    text = read_text(path, "text")
    if not text.strip():
        raise InvalidParameter("text", f"{str(path)!r} has no text to score")
    return text


def cut(tokens: Sequence[int], start: Sequence[int] = ()) -> list[list[int]]:
    """Pieces of at most `PIECE` tokens, each behind `start` if the text is; a last one of one token is left out."""
    start = start if list(tokens[: len(start)]) == list(start) else ()
    rest, size = tokens[len(start) :], PIECE - len(start)
    pieces = [[*start, *rest[at : at + size]] for at in range(0, len(rest), size)]
    return pieces[:-1] if len(pieces) > 1 and len(pieces[-1]) < 2 + len(start) else pieces


@in_inference_mode
def score(started: StartedEngine, tokens: Sequence[int]) -> Scores:
    """Run one text as one chunk, with the model and the attention that serve requests."""
    import torch
    import torch.nn.functional as F

    from chairlift.attention.batch import build_batch

    if len(tokens) < 2:
        raise InvalidParameter("texts", "a text must have at least two tokens")
    request = Request("quality", list(tokens), SamplingParams(), max_new_tokens=1, arrival=0.0)
    plan, runner = StepPlan(0, (whole_chunk(started.memory, request, samples=False),)), started.runner
    rectangular = runner.attention.capabilities.rectangular
    batch = build_batch(plan, runner.storage, runner.model.device, states=runner.states, rectangular=rectangular)
    hidden = runner.model.hidden_states(batch, runner.attention.begin(batch, runner.storage)).last
    losses, likeliest = [], []
    following = torch.tensor(tokens[1:], device=hidden.device)
    for rows, actual in zip(hidden[:-1].split(LOGIT_ROWS), following.split(LOGIT_ROWS), strict=True):
        logits = runner.model.logits(rows).float()
        losses.append(F.cross_entropy(logits, actual, reduction="none"))
        likeliest.append(logits.argmax(dim=-1))
    return Scores(torch.cat(losses).cpu(), torch.cat(likeliest).cpu())


def parse_modes(text: str, device: str = "cpu") -> list[str]:
    """The names in a list separated by semicolons, since modes have commas in their names."""
    names, choices = [name.strip() for name in text.split(";") if name.strip()], modes_on(device)
    for name in names:
        if name not in choices:
            raise InvalidParameter("modes", f"there is no {name!r}; choose from {'; '.join(choices)}")
    if not names:
        raise InvalidParameter("modes", "must name at least one")
    return names


def quality_panels(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    def mode(row: Mapping[str, Any]) -> str:
        return str(row["name"]).replace(", ", "\n")

    loss = "Perplexity increase, % (line: limit for a default)"
    same = "Same likeliest token as float32, %"
    return [
        Plot(title=loss, rows=rows, x=mode, y="perplexity_change", factor=100, level=100 * LARGEST_LOSS),
        Plot(title=same, rows=rows, x=mode, y="greedy_agreement", factor=100, limits=(80, 100), colours=("tab:green",)),
    ]


LARGEST_LOSS = 0.02  # A default option may cost this share of perplexity.
COLUMNS = (
    Column("", "name"),
    Column("Perplexity", "perplexity", ".3f"),
    Column("Change", "perplexity_change", "+.2%"),
    Column("±", "standard_error", ".1%"),
    Column("Same\ntop token", "greedy_agreement", ".1%"),
    Column("Weights", lambda row: format_bytes(row["weight_bytes"])),
    Column("KV bytes\nper token", "kv_bytes_per_token", ","),
    Column(f"Within {LARGEST_LOSS:.0%}", lambda row: row["perplexity_change"] <= LARGEST_LOSS),
)


@bench(
    "quality",
    "chairlift bench quality --json quality.json --plot quality.png",
    "chairlift bench quality --model path/to/model --modes 'int8, KV bfloat16'",
    "chairlift bench quality --block-types all",
    "chairlift bench quality --text wiki.test.raw --device cuda",
    report=ReportOptions,
)
def bench_quality(
    note: Note,
    model: Annotated[str, typer.Option("--model", "-m", help="The model to measure.")] = DEFAULT_MODEL,
    modes: Annotated[
        str | None, typer.Option(help="Modes to compare with float32, separated by ;.", show_default="all")
    ] = None,
    block_types: Annotated[
        str | None,
        typer.Option(
            help="Instead, round the matrices of a GGUF model to these types of blocks (all, or Q4_0,Q4_K,…), and "
            "compare computing with the blocks with their dequantized weights in float32."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file to score instead, in pieces of 1,024 tokens.", show_default="fixed texts"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> BenchResult:
    """The cost of 8-bit weights and of a smaller KV cache in perplexity, on fixed texts.

    Perplexity against float32 with its standard error (two thirds of repeated
    measurements are within it), and how often the likeliest next token is the
    same. An option that costs more than 2% of perplexity must not be a default.
    """
    texts = QUALITY_TEXTS if text is None else (text_to_score(text),)
    scored = {"text": None if text is None else text.name}
    if block_types is not None:
        if modes is not None:
            raise InvalidParameter("block_types", "was given together with modes; give one")
        rows = measure_block_types(model, block_types, note, texts=texts)
        settings = {"model": model, "block_types": [row["name"] for row in rows], "device": "cpu", **scored}
        return BenchResult(settings, rows, [quality_table(f"{model} in blocks", rows)])
    chosen = parse_modes(modes, device) if modes is not None else list(modes_on(device))
    rows = measure_quality(model, chosen, note, texts=texts, device=device)
    return BenchResult(
        {"model": model, "modes": chosen, "device": device, **scored},
        rows,
        [quality_table(model, rows)],
        picture("The cost of rounding", quality_panels(rows)),
    )


def quality_table(model: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    caption = "Perplexity: how many tokens the model hesitates between on average; less is better"
    return Table(f"Quality of {model}", COLUMNS, rows, caption)
