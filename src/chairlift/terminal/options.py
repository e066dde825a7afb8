"""The options that several commands share, each written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from chairlift.core.sampling_params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.loading.store import DEFAULT_MODEL

if TYPE_CHECKING:
    from chairlift.llm import LLM

_MODEL, _ENGINE, _SAMPLING = "Model", "Engine", "Sampling"


ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model, and how to run it. All but `model` and `quiet` are fields of `EngineConfig`."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A known name (see `chairlift models`), a .gguf file, a folder with safetensors, or a hub id.",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT_MODEL
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)] = "auto"
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)] = "auto"
    quantization: Annotated[
        str,
        typer.Option(
            help="int8: weights in 8 bits, on a CPU. fp8: in 8-bit floats, on a GPU. none. "
            "auto: int8 where it is faster, unless a dtype is given.",
            rich_help_panel=_ENGINE,
        ),
    ] = "auto"
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Of the KV cache: auto, float32, bfloat16, float16 or, on a GPU, fp8.", rich_help_panel=_ENGINE
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt and output together, in tokens.",
            rich_help_panel=_ENGINE,
            show_default="the model's limit",
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens per step, of all requests together.", rich_help_panel=_ENGINE, show_default="from the machine"
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help="How many of those may be prompt tokens.", rich_help_panel=_ENGINE, show_default="all of them"
        ),
    ] = None
    max_batch_requests: Annotated[
        int | None,
        typer.Option(help="Requests per step.", rich_help_panel=_ENGINE, show_default="from the machine"),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="How much of those tokens a step uses: fixed (all), knee (what throughput needs) or latency (what the "
            "targets leave).",
            rich_help_panel=_ENGINE,
            show_default="latency if there is a target, else fixed",
        ),
    ] = None
    target_tpot_ms: Annotated[
        float | None,
        typer.Option(
            help="Time per output token that running requests should keep while others arrive.",
            rich_help_panel=_ENGINE,
            show_default="none",
        ),
    ] = None
    target_ttft_ms: Annotated[
        float | None,
        typer.Option(
            help="Time to the first token that new requests should keep.",
            rich_help_panel=_ENGINE,
            show_default="none",
        ),
    ] = None
    block_size: Annotated[int, typer.Option(help="Tokens per block of the KV cache.", rich_help_panel=_ENGINE)] = 16
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the KV cache, such as 2GiB.",
            rich_help_panel=_ENGINE,
            show_default="a share of what is free",
        ),
    ] = None
    memory_share: Annotated[
        float | None,
        typer.Option(
            help="Instead of --kv-memory: this share of the memory that is free after loading.",
            rich_help_panel=_ENGINE,
            show_default="0.25 on a CPU, 0.9 on a GPU",
        ),
    ] = None
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Reuse the cached start of earlier prompts.",
            rich_help_panel=_ENGINE,
        ),
    ] = True
    policy: Annotated[
        str,
        typer.Option(
            help="When requests board: continuous (at every step), static or dynamic (in batches).",
            rich_help_panel=_ENGINE,
        ),
    ] = "continuous"
    max_delay_ms: Annotated[
        float | None,
        typer.Option(
            help="How long a static or dynamic batch waits to be filled.",
            rich_help_panel=_ENGINE,
            show_default="dynamic 50, static 10000",
        ),
    ] = None
    order: Annotated[
        str,
        typer.Option(
            help="Who boards first: fcfs (first come), priority, shortest (least work) or fair (between tenants).",
            rich_help_panel=_ENGINE,
        ),
    ] = "fcfs"
    tenant_weights: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant-weight",
            metavar="NAME=WEIGHT",
            help="A tenant's share with --order fair, such as alice=2; may be given several times.",
            rich_help_panel=_ENGINE,
            show_default="1 each",
        ),
    ] = None
    preemption: Annotated[
        str,
        typer.Option(
            help="When memory runs out: recompute, swap to host memory, or auto (the cheaper by measured figures).",
            rich_help_panel=_ENGINE,
        ),
    ] = "recompute"
    swap_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory for --preemption swap, such as 4GiB.",
            rich_help_panel=_ENGINE,
            show_default="as much as the KV cache",
        ),
    ] = None
    max_overtakes: Annotated[
        int,
        typer.Option(
            help="How often a waiting request may be overtaken before nobody boards ahead of it.",
            rich_help_panel=_ENGINE,
        ),
    ] = 16
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="ngram | layers:N | draft:PATH",
            help="Guess the next tokens and verify several in one step: from the text so far, by the model's first N "
            "layers, or by a small model (see train-draft). The output does not change.",
            rich_help_panel=_ENGINE,
            show_default="no",
        ),
    ] = None
    draft_length: Annotated[
        int | None,
        typer.Option(
            help="Guesses at a time with --speculate.", rich_help_panel=_ENGINE, show_default="as many as pay"
        ),
    ] = None
    attention: Annotated[
        str, typer.Option(help="Attention backend: auto, or one by name.", rich_help_panel=_ENGINE)
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant/--no-batch-invariant",
            help="Bit-identical answers whatever shares the batch; slower.",
            rich_help_panel=_ENGINE,
        ),
    ] = False
    cuda_graphs: Annotated[
        bool, typer.Option(help="On a GPU: capture steps and replay them.", rich_help_panel=_ENGINE)
    ] = True
    load_format: Annotated[
        str, typer.Option(help="auto, or dummy: random weights for a config.json.", rich_help_panel=_MODEL)
    ] = "auto"
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Show neither the start-up arithmetic nor progress.", rich_help_panel=_MODEL
        ),
    ] = False

    def config(self) -> dict[str, Any]:
        """The arguments of `EngineConfig`."""
        return {name: value for name, value in asdict(self).items() if name not in ("model", "quiet")}

    def load(self) -> LLM:
        from chairlift.llm import LLM
        from chairlift.terminal.console import show_log

        show_log(quiet=self.quiet)
        return LLM(self.model, progress=not self.quiet, **self.config())


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How to choose tokens: fields of `SamplingParams`. The defaults suit a person who reads the answers."""

    temperature: Annotated[
        float, typer.Option(help="Randomness; 0 always takes the likeliest token.", rich_help_panel=_SAMPLING)
    ] = 0.7
    top_k: Annotated[
        int, typer.Option(help="Choose among the k likeliest tokens; 0 means all.", rich_help_panel=_SAMPLING)
    ] = 0
    top_p: Annotated[
        float,
        typer.Option(help="Choose among the likeliest tokens that sum up to this.", rich_help_panel=_SAMPLING),
    ] = 0.95
    min_p: Annotated[
        float,
        typer.Option(help="Drop tokens less likely than this share of the likeliest one.", rich_help_panel=_SAMPLING),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Above 1, tokens seen so far become less likely.", rich_help_panel=_SAMPLING),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        typer.Option(help="Subtracted from the score of every token generated so far.", rich_help_panel=_SAMPLING),
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, once for each time it was generated.", rich_help_panel=_SAMPLING)
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(help="Makes the output repeatable.", rich_help_panel=_SAMPLING, show_default="random"),
    ] = None
    max_tokens: Annotated[int, typer.Option(help="Longest output, in tokens.", rich_help_panel=_SAMPLING)] = 256
    min_tokens: Annotated[int, typer.Option(help="Shortest output, in tokens.", rich_help_panel=_SAMPLING)] = 0
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the output before this text; may be given several times.", rich_help_panel=_SAMPLING),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on when the model says it is done.", rich_help_panel=_SAMPLING)
    ] = False

    def params(self, n: int = 1) -> SamplingParams:
        return SamplingParams(n=n, **asdict(self))


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Spread every parameter of `command` that is one of the dataclasses above into one option for each field.

    Typer reads a command's options from its signature, so the command gets one that lists them all, and the
    values are put together again when it is called.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _field_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def spread(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


def refuse_given(context: typer.Context, names: Iterable[str], problem: str) -> None:
    """Raise if any of these options was typed: where it would change nothing, it must not look as if it did."""
    for name in names:
        if given(context, name):
            raise InvalidParameter(name, problem)


def given(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, be it with the value that it has by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(["[bold]Examples[/bold]", *lines])
