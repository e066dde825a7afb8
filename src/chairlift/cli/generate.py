"""`chairlift generate`: complete prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.cli.app import RUN, app
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.options import read_text
from chairlift.outputs import RequestMetrics, RequestOutput
from chairlift.terminal.answers import AnswerMeter
from chairlift.terminal.console import note, show_error, write_text
from chairlift.terminal.options import EngineOptions, SamplingOptions, SearchOptions

if TYPE_CHECKING:
    from chairlift.llm import LLM

MAX_PROMPTS_MIB = 1024  # The limit of a file of prompts.


@app.command(
    group=RUN,
    examples=[
        'chairlift generate "The capital of France is" --temperature 0',
        'chairlift generate "Once upon a time" "In the beginning" --json',
        "git log -5 | chairlift generate --max-tokens 64",
        "chairlift generate --file prompts.txt --model models/llama.gguf",
    ],
)
def generate(
    context: typer.Context,
    engine: EngineOptions,
    sampling: SamplingOptions,
    search: SearchOptions,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to complete; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help='File with one prompt per line, or .jsonl with one {"prompt": …} per line.'),
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Completions for each prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per completion and line.")] = False,
) -> None:
    """Complete prompts, all of them together in one continuous batch.

    All arguments are prompts, so the model is named by --model; `chairlift run
    MODEL PROMPT` takes it first. A single prompt on a terminal is streamed. Otherwise results are printed
    when all are finished, in the order of the prompts. Sampling options that are
    not given are those that the model recommends, if it does.
    """
    sampling.params(n=n, **search.params())  # check the parameters before the model is loaded
    engine.check_preset(sampling.preset)
    inputs = _read_prompts(prompts or [], file)
    llm = engine.load()
    defaults = {"max_tokens": sampling.max_tokens, **llm.defaults.preset(sampling.preset).sampling}
    given = {name: value for name, value in sampling.given(context).items() if name != "preset"}
    params = SamplingParams.with_defaults(defaults, **given, n=n, **search.params())
    alone = len(inputs) == 1 and n == 1
    if alone and params.num_sequences == 1 and not as_json and sys.stdout.isatty():
        _stream(llm, inputs[0], params, engine.quiet)
        return
    results = llm.generate(inputs, params, use_tqdm=not engine.quiet)
    for index, result in enumerate(results):
        if as_json:
            _print_json(index, result)
        else:
            _print_texts(index, result, alone=alone)
    _report_failures(results)


# ---- prompts in -------------------------------------------------------------------------------------------------


def _read_prompts(prompts: Sequence[str], file: Path | None) -> list[Any]:
    if prompts and file is not None:
        raise InvalidParameter("file", "prompts come from the command line or from a file; give only one of them")
    if file is not None:
        return _read_prompt_file(file)
    if not prompts and sys.stdin.isatty():
        raise InvalidParameter("prompt", "is missing; give one, a --file of them, or pipe one in")
    texts = [_read_stdin() if prompt == "-" else prompt for prompt in prompts or ["-"]]
    if not all(texts):
        source = "is empty" if prompts else "is missing: standard input is empty"
        raise InvalidParameter("prompt", f"{source}; give one, a --file of them, or pipe one in")
    return texts


def _read_stdin() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise InvalidParameter("prompt", f"standard input is not UTF-8 text ({error.reason})") from None


def _read_prompt_file(file: Path) -> list[Any]:
    lines = read_text(file, "file", MAX_PROMPTS_MIB).splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InvalidParameter("file", f"{str(file)!r} has no prompts in it; write one per line")
    if file.suffix == ".jsonl":
        return [_parse_json_line(file, number, line) for number, line in numbered]
    return [line for _, line in numbered]


def _parse_json_line(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidParameter("file", f"line {number} of {str(file)!r} is not JSON ({error})") from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("prompt"), str):
        raise InvalidParameter("file", f'line {number} of {str(file)!r} must look like {{"prompt": "some text"}}')
    return parsed


# ---- results out ------------------------------------------------------------------------------------------------


def _stream(llm: LLM, prompt: Any, params: SamplingParams, quiet: bool) -> None:
    meter = AnswerMeter(params.max_tokens)
    llm.engine.subscribe(meter)
    for piece in llm.stream(prompt, params):
        write_text(piece.text)
    write_text("\n")
    if not quiet:
        note(meter.summary())
    meter.check()


def _print_texts(index: int, result: RequestOutput, *, alone: bool) -> None:
    for completion in result.outputs:
        if not alone:
            number = f"{index + 1}" + (f".{completion.index + 1}" if len(result.outputs) > 1 else "")
            write_text(f"── {number}  {_shorten(result.prompt or '')}\n")
        write_text(completion.text + "\n")


def _shorten(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _print_json(index: int, result: RequestOutput) -> None:
    for completion in result.outputs:
        fields = {
            "prompt_index": index,
            "index": completion.index,
            "prompt": result.prompt,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": len(result.prompt_token_ids),
            "num_cached_tokens": result.cached_tokens,
            "num_tokens": len(completion.token_ids),
            "score": completion.score,
            "metrics": _metrics(result.metrics),
        }
        typer.echo(json.dumps(fields, ensure_ascii=False))


def _metrics(metrics: RequestMetrics) -> dict[str, Any]:
    """Return times in seconds; token times are those of the prompt's first completion."""
    gaps = metrics.inter_token
    return {
        "queued": metrics.queued,
        "time_to_first_token": metrics.time_to_first_token,
        "inter_token_mean": sum(gaps) / len(gaps) if gaps else None,
        "end_to_end": metrics.end_to_end,
        "preemptions": metrics.preemptions,
    }


def _report_failures(results: Sequence[RequestOutput]) -> None:
    failed = [output for result in results for output in result.outputs if output.finish_reason == "error"]
    if failed:
        show_error(f"{len(failed)} completions failed: {failed[0].stop_reason}")
        raise typer.Exit(1)
