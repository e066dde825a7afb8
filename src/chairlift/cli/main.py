"""The command line. Importing it is fast: torch is loaded by the commands that need it, when they run."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from chairlift import __version__
from chairlift.cli.batch import batch
from chairlift.cli.bench import bench_app
from chairlift.cli.chat import chat
from chairlift.cli.explain import explain
from chairlift.cli.generate import generate
from chairlift.cli.models import models
from chairlift.cli.profile import profile
from chairlift.cli.record import record
from chairlift.cli.serve import serve
from chairlift.cli.simulate import plan, simulate
from chairlift.cli.train_draft import train_draft
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.terminal.console import show_error
from chairlift.terminal.options import examples


class _Commands(TyperGroup):
    """Shows errors raised on purpose as one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ChairliftError as error:
            if os.environ.get("CHAIRLIFT_DEBUG") == "1":
                raise
            show_error(_explain(error, self.commands[ctx.invoked_subcommand]))
            raise typer.Exit(2) from error


def _explain(error: ChairliftError, command: Any) -> str:
    """The error's text, with the option that it is about spelled as it was typed."""
    if isinstance(error, InvalidParameter):
        option = f"--{error.parameter.replace('_', '-')}"
        if option in _options(command):
            return f"{option}: {error.problem}"
    return str(error)


def _options(command: Any) -> set[str]:
    """The options of a command and of those under it."""
    own = {name for parameter in command.params for name in parameter.opts}
    return own.union(*(_options(child) for child in getattr(command, "commands", {}).values()))


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=examples(
        "chairlift serve",
        "chairlift chat",
        'chairlift generate "The capital of France is" --temperature 0',
        "chairlift bench throughput --json result.json",
    ),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chairlift {__version__}")
        raise typer.Exit


@app.callback()
def chairlift(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """An LLM inference engine built around continuous batching: one ragged, paged batch per step."""


app.command(
    epilog=examples(
        'chairlift generate "The capital of France is" --temperature 0',
        'chairlift generate "Once upon a time" "In the beginning" --json',
        "git log -5 | chairlift generate --max-tokens 64",
        "chairlift generate --file prompts.txt --model models/llama.gguf",
    )
)(generate)
app.command(
    epilog=examples(
        "chairlift chat",
        'chairlift chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence."',
        'echo "What is a chairlift?" | chairlift chat --quiet --temperature 0',
        "chairlift chat --url http://localhost:8000",
    )
)(chat)
app.command(
    epilog=examples(
        "chairlift serve",
        "chairlift serve Qwen/Qwen3-0.6B --port 8080 --max-batch-requests 128",
        "CHAIRLIFT_API_KEY=secret chairlift serve --host 0.0.0.0",
    )
)(serve)
app.command(
    epilog=examples(
        "chairlift simulate --model llama3-8b --device h200 --rate 20 --target-ttft-ms 500 --target-tpot-ms 30",
        "chairlift simulate --trace traffic.csv --replicas 8 --router least-loaded --plot simulation.png",
        "chairlift simulate --policy static --requests 200",
    )
)(simulate)
app.command(
    epilog=examples(
        "chairlift plan --model llama3-8b --device h200 --rate 50 --target-ttft-ms 500 --target-tpot-ms 30",
        "chairlift plan --model path/to/config.json --device l4 --dtype int8 --plot plan.png",
        "chairlift plan --device custom --bandwidth 900 --tflops 180 --memory 48",
    )
)(plan)
app.command(
    epilog=examples(
        "chairlift batch requests.jsonl answers.jsonl",
        "chairlift batch requests.jsonl answers.jsonl --model Qwen/Qwen3-0.6B --served-model-name gpt-4o-mini",
        "chairlift batch requests.jsonl answers.jsonl --url http://localhost:8000 --concurrency 64",
    )
)(batch)
app.command(
    epilog=examples(
        "chairlift explain batching --out guide",
        "chairlift explain all --out guide",
        "chairlift explain masks --out pictures --formats svg",
    )
)(explain)
app.command(
    "train-draft",
    epilog=examples(
        "chairlift train-draft smollm2-135m --output drafts/smollm2",
        "chairlift train-draft Qwen/Qwen3-0.6B --output drafts/qwen --prompts questions.txt --texts 5000",
        "chairlift serve Qwen/Qwen3-0.6B --speculate draft:drafts/qwen",
    ),
)(train_draft)
app.command(
    epilog=examples(
        "chairlift record run.lift --seconds 30",
        "chairlift record run.html --url http://gpu-server:8000 --api-key SECRET",
    )
)(record)
app.command(
    epilog=examples(
        "chairlift profile --quantization int8 --out trace.json",
        "chairlift profile Qwen/Qwen3-0.6B --batch 1,64 --prompt-tokens 512 --steps 64",
        "chairlift profile --model-config qwen3-0.6b --device cuda --batch 64 --out trace.json --json profile.json",
    )
)(profile)
app.command(epilog=examples("chairlift models", "chairlift models --json"))(models)
app.add_typer(bench_app, name="bench")


def main() -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where UTF-8 cannot be shown, a ? is better than no answer
    app(prog_name="chairlift")
