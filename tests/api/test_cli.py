"""The command line: help, errors, models and benches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from chairlift import EngineConfig, SamplingParams, __version__
from chairlift.cli.app import FIRST
from chairlift.cli.main import app
from chairlift.options import options_of
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions, SamplingOptions
from chairlift_lab.bench.base import BENCHES
from tests.api.cli_runner import FAST, run

COMMANDS = [
    [],
    ["generate"],
    ["run"],
    ["chat"],
    ["serve"],
    ["simulate"],
    ["plan"],
    ["batch"],
    ["explain"],
    ["train-draft"],
    ["tune"],
    ["record"],
    ["profile"],
    ["models"],
    ["pull"],
    ["list"],
    ["show"],
    ["rm"],
    ["ps"],
    ["stop"],
    ["cache"],
    ["compile"],
    ["make-model"],
    ["cluster"],
    ["cluster", "serve"],
    ["cluster", "status"],
    ["cluster", "stop"],
    ["bench"],
    *(["bench", name] for name in BENCHES.names()),
]

# ---- help -------------------------------------------------------------------------------------------------------


def find_command(words: list[str]) -> Any:
    command: Any = get_command(app)
    for word in words:
        command = command.get_command(None, word)
    return command


def all_options(words: list[str]) -> str:
    """The help with all options; groups of commands have one help only."""
    return "--help" if hasattr(find_command(words), "commands") else "--help=all"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_lists_every_option_and_examples(words: list[str]) -> None:
    result = run(*words, all_options(words))
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert result.stdout.count("chairlift " + " ".join(words)) >= 2, "usage and an example"
    for parameter in find_command(words).params:
        assert parameter.help, f"{parameter.name} has no help"
        if parameter.param_type_name == "option":
            assert all(name in result.stdout for name in (*parameter.opts, *parameter.secondary_opts))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_at_80_columns_shows_whole_flags_on_one_line(words: list[str]) -> None:
    assert max(map(len, run(*words, "--help", COLUMNS="80").stdout.splitlines())) <= 80
    lines = run(*words, all_options(words), COLUMNS="80").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for parameter in find_command(words).params:
        if parameter.param_type_name == "option":
            flags = (*parameter.opts, *parameter.secondary_opts)
            starts = [line.split() for line in lines if line.startswith("  -")]
            assert any(all(flag in {word.strip(",") for word in start} for flag in flags) for start in starts), flags


# The words that stand for values in help texts.
WORDS = {
    *("ADDRESS", "DEVICE", "FILE", "FOLDER", "JSON", "KEY", "MODEL", "N", "NAME", "NUMBER", "ORIGIN", "SIZE", "TYPE"),
    *("URL", "MILLISECONDS", "SECONDS", "MINUTES", "LOW:HIGH", "FILE|FOLDER", "MODEL|ADDRESS|PID"),
    *(
        "NAME=FILE",
        "NAME=MODEL",
        "NAME=TARGETS",
        "TARGETS",
        "NAME=WEIGHT",
        "N[,N…]",
        "NAME[,NAME…]",
        "NAME=VALUE[,NAME=VALUE…]",
    ),
    *("PROMPT", "INPUT", "OUTPUT", "TOPIC"),  # what arguments are for
    *("HOST", "NAME=PATH"),
}
TEXTS = {"--stop", "--system", "--system-prompt", "PROMPT"}  # Their values are texts.


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_values_have_the_same_words_in_all_help_texts(words: list[str]) -> None:
    result = run(*words, "--help")
    assert "<" not in "".join(line for line in result.stdout.splitlines() if re.match(r"  (-|[A-Z])", line))
    for parameter in find_command(words).params:
        if getattr(parameter, "is_flag", False):
            continue
        word = parameter.metavar or parameter.name.upper()
        is_choice = word[0] == "[" and word[-1] == "]"
        is_text = word == "TEXT" and {*parameter.opts, word} & TEXTS
        assert word in WORDS or is_choice or is_text, f"{parameter.opts} {word}"


def test_the_words_that_are_known_are_used() -> None:
    used = {getattr(parameter, "metavar", None) for words in COMMANDS for parameter in find_command(words).params}
    assert used >= WORDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_model_may_be_an_argument_wherever_it_is_an_option(words: list[str]) -> None:
    parameters = {parameter.name: parameter for parameter in find_command(words).params}
    option = parameters.get("model")
    if option is None or option.param_type_name == "argument":
        return
    last = [parameter for parameter in parameters.values() if parameter.param_type_name == "argument"][-1]
    assert last.metavar == "MODEL" or last.nargs == -1, f"{words} takes --model, but no MODEL"


def test_a_model_is_given_once() -> None:
    result = run("serve", "one", "--model", "two")
    assert result.exit_code == 2
    assert result.stderr == "error: --model: was given twice: 'one' and 'two'\n"


def test_the_help_begins_with_what_a_newcomer_needs() -> None:
    lines = run("--help").stdout.splitlines()
    sections = [line.rstrip(":") for line in lines if re.fullmatch(r"[A-Z][^:]*:", line)]
    assert sections[1:4] == ["Run a model", "Models on this machine", "Servers and fleets"]
    commands = lines[lines.index("Run a model:") :]
    names = [line.split()[0] for line in commands if re.match(r"  [a-z]", line)]
    assert [name for name in FIRST if name in names] == names[: len(set(FIRST) & set(names))]


def test_help_shows_options_in_groups() -> None:
    lines = run("serve", "--help=all", COLUMNS="80").stdout.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    groups = {option.group for group in (EngineConfig, ServerOptions) for option in options_of(group)}
    assert {f"{group}:" for group in groups} < set(headings)
    assert lines.index("KV cache:") < next(i for i, line in enumerate(lines) if line.startswith("  --kv-memory"))


def test_help_is_short_and_has_a_view_of_each_group() -> None:
    short = run("serve", "--help", COLUMNS="80").stdout
    assert "--port" in short
    assert "--ssl-keyfile" not in short
    assert sum(line.startswith("  -") for line in short.splitlines()) < 20
    access = run("serve", "--help=access", COLUMNS="80").stdout
    assert "--ssl-keyfile" in access
    assert "--port" not in access
    assert run("serve", "--help=kv", COLUMNS="80").stdout == run("serve", "--help=kv-cache", COLUMNS="80").stdout
    unknown = run("serve", "--help=nothing")
    assert unknown.exit_code == 2
    assert "unknown group 'nothing'; choose from server, access, " in unknown.stderr


def test_every_command_is_tested_here() -> None:
    command: Any = get_command(app)
    assert sorted(command.commands) == sorted({words[0] for words in COMMANDS if words})


def test_version() -> None:
    assert run("--version").stdout.strip() == f"chairlift {__version__}"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["bench", "--help"], ["bench", "throughput", "--help"], ["bench", "serve", "--help"], ["--version"]],
    ids=" ".join,
)
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys, chairlift.cli.main\n"
        "try:\n    chairlift.cli.main.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'numba'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_benches_of_the_engine_need_no_package_of_the_server() -> None:
    """A machine with a GPU may have only what the engine needs."""
    program = (
        "import sys\n"
        "for name in ('fastapi', 'h11', 'httpx', 'llguidance', 'msgspec', 'starlette', 'uvicorn'):\n"
        "    sys.modules[name] = None\n"
        "import chairlift.cli.main\n"
        "chairlift.cli.main.main()\n"
    )
    arguments = [sys.executable, "-c", program, "bench", "shapes", "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_option_groups_equal_the_config_and_the_sampling_params() -> None:
    def defaults(group: Any) -> dict[str, Any]:
        return {field.name: field.default for field in fields(group)}

    engine = defaults(EngineOptions)
    del engine["model"], engine["quiet"], engine["verbose"]
    assert engine == defaults(EngineConfig)
    assert set(defaults(SamplingOptions)) - {"preset"} < set(defaults(SamplingParams))


# ---- errors -----------------------------------------------------------------------------------------------------

WRONG = [
    (["generate", "hi", "--model", "nowhere"], "no model 'nowhere'"),
    (["chat", "--model", "nowhere"], "no model 'nowhere'"),
    (["bench", "throughput", "--model", "nowhere"], "no model 'nowhere'"),
    (["generate", "hi", "--top-p", "3"], "--top-p: must"),
    (["generate", "hi", "--temperature", "nan"], "--temperature: must"),
    (["generate", "hi", "--n", "0"], "--n: must"),
    (["generate", "hi", "--stop", ""], "--stop: must"),
    (["generate", "hi", "--min-tokens", "9", "--max-tokens", "3"], "--min-tokens: must not exceed max_tokens"),
    (["generate", "hi", "--file", "prompts.txt"], "--file: "),
    (["generate", "--file", "nowhere.txt"], "--file: cannot read"),
    (["generate", "hi", "--dtype", "int7"], "--dtype: "),
    (["generate", "hi", "--device", "toaster"], "--device: "),
    (["generate", "hi", "--attention", "none"], "--attention: "),
    (["generate", "hi", "--block-size", "0"], "--block-size: "),
    (["chat", "--max-batch-tokens", "8", "--max-batch-requests", "9"], "--max-batch-requests: "),
    (["chat", "--seed", "-1"], "--seed: "),
    (["bench", "throughput", "--engines", "vllm"], "--engines: there is no 'vllm'"),
    (["bench", "throughput", "--prompt-len", "9:3"], "--prompt-len: "),
    (["bench", "throughput", "--output-len", "few"], "--output-len: "),
    (["bench", "throughput", "--json", "no/such/folder.json"], "--json: cannot write"),
    (["bench", "throughput", "--workload", "nowhere.json"], "--workload: cannot read"),
    (["bench", "throughput", "--workload", "some.json", "--seed", "3"], "--seed: the requests come from"),
    (["bench", "throughput", "--concurrency", "0"], "--concurrency: "),
    (["bench", "throughput", "--concurrency", "2", "--max-batch-requests", "3"], "--concurrency: "),
    (["bench", "serve", "--model", "nowhere"], "no model 'nowhere'"),
    (["bench", "serve", "--rate", "0"], "--rate: must"),
    (["bench", "serve", "--rate", "2", "--concurrency", "2"], "--rate: "),
    (["bench", "serve", "--rate", "2", "--arrivals", "never"], "--arrivals: there is no 'never'"),
    (["bench", "serve", "--rate", "2", "--burstiness", "2"], "--burstiness: only goes with"),
    (["bench", "serve", "--rate", "2", "--arrivals", "bursty", "--burstiness", "0"], "--burstiness: must"),
    (["bench", "serve", "--arrivals", "bursty"], "--arrivals: needs a --rate"),
    (["bench", "serve", "--num-requests", "0"], "--num-requests: must"),
    (["bench", "serve", "--duration", "nan"], "--duration: must"),
    (["bench", "serve", "--warmup", "-1"], "--warmup: must"),
    (["bench", "serve", "--shared-prefix", "2"], "--shared-prefix: must"),
    (["bench", "serve", "--prefix-groups", "0"], "--prefix-groups: must"),
    (["bench", "serve", "--max-ttft-ms", "0"], "--max-ttft-ms: must"),
    (["bench", "serve", "--api", "carrier-pigeon"], "--api: there is no"),
    (["bench", "serve", "--extra-body", "[1]"], "--extra-body: must"),
    (["bench", "serve", "--trace-speed", "2"], "--trace-speed: only goes with"),
    (["bench", "serve", "--trace", "t.csv", "--trace-speed", "0"], "--trace-speed: must"),
    (["bench", "serve", "--trace", "t.csv", "--prompt-len", "9"], "--prompt-len: the requests come from"),
    (["bench", "serve", "--workload", "w.json", "--api", "chat"], "--workload: has token ids"),
    (["bench", "serve", "--url", "http://localhost:1"], "no server at http://localhost:1"),
    (["bench", "serve", "--url", "ftp://localhost"], "--url: must look like"),
    (["bench", "serve", "--url", "http://localhost:99999"], "--url: has no valid port"),
    (["bench", "serve", "--url", "http://localhost:1", "--device", "cpu"], "--device: is for an own engine"),
    (["bench", "serve", "--url", "http://localhost:1", "--compare-offline"], "--compare-offline: needs"),
    (["bench", "serve", "--duration", "3", "--compare-offline"], "--compare-offline: needs"),
    (["bench", "serve", "--token-ids", "1:2"], "--token-ids: only goes with --url"),
    (["bench", "serve", "--plot", "no/such/folder.png"], "--plot: cannot write"),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_an_error_is_one_line_that_names_the_option(arguments: list[str], expected: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", ""], "prompt: is empty"),
        (["generate", "word " * 300], "prompt: has"),
        (["generate", "hi", "--max-model-len", "100000"], "--max-model-len: "),
        (["generate", "hi", "--kv-memory", "much"], "--kv-memory: must"),
        (["bench", "throughput", "--requests", "0"], "--requests: must"),
        (["bench", "throughput", "--engines", "chairlift", "--prompt-len", "9000"], "--max-model-len: "),
        (["bench", "serve", "--prompt-len", "9000"], "--prompt-len: requests may have 9256 tokens"),
        (["bench", "serve", "--trace", "nowhere.csv"], "--trace: cannot read"),
    ],
)
def test_an_error_that_needs_the_model_is_one_line_too(tiny: str, arguments: list[str], expected: str) -> None:
    result = run(*arguments, "--model", tiny, "--device", "cpu", "--quiet")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr


@pytest.mark.parametrize("arguments", [["generate", "--temperature", "warm"], ["chat", "--frobnicate"], ["fly"]])
def test_a_mistyped_command_shows_how_to_get_help(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert arguments[-2 if len(arguments) == 3 else -1] in result.stderr
    assert "--help" in result.stderr
    assert "Traceback" not in result.stderr


def test_debugging_shows_the_traceback() -> None:
    result = run("generate", "hi", "--top-p", "3", CHAIRLIFT_DEBUG="1")
    assert type(result.exception).__name__ == "InvalidParameter"


# ---- models and bench -------------------------------------------------------------------------------------------


def test_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run("models", CHAIRLIFT_CACHE=str(tmp_path))
    assert result.exit_code == 0
    for expected in ("smollm2-135m", "Apache-2.0", "98 MB", "fetched on first use", "Llama", "gguf", "safetensors"):
        assert expected in result.stdout
    narrow = run("models", CHAIRLIFT_CACHE=str(tmp_path), COLUMNS="80").stdout.splitlines()
    assert max(map(len, narrow)) <= 80
    listed = json.loads(run("models", "--json", CHAIRLIFT_CACHE=str(tmp_path)).stdout)
    assert listed["models"][0]["name"] == "smollm2-135m"
    assert listed["models"][0]["cached"] is False
    assert listed["models"][0]["default"] is True
    assert any("Qwen" in family for family in listed["families"])


def test_bench_throughput_writes_a_report(tiny: str, tmp_path: Path) -> None:
    report, workload = tmp_path / "report.json", tmp_path / "workload.json"
    requests = [{"prompt_ids": [5, 6, 7], "n_out": 3}, {"prompt_ids": [9] * 20, "n_out": 2}]
    workload.write_text(json.dumps({"requests": requests}))
    options = ["--engines", "chairlift,one-at-a-time", "--workload", str(workload), "--concurrency", "2"]
    result = run("bench", "throughput", "--model", tiny, *FAST, *options, "--json", str(report))
    assert result.exit_code == 0, result.output
    assert "one-at-a-time" in result.stdout
    written = json.loads(report.read_text())
    assert written["bench"] == "throughput"
    assert written["settings"]["concurrency"] == 2
    assert written["settings"]["workload"] == "workload.json"
    assert [row["name"] for row in written["rows"]] == ["chairlift", "one-at-a-time"]
    assert {row["output_tokens"] for row in written["rows"]} == {5}
    assert set(written["rows"][0]["speedup_vs"]) == {"one-at-a-time"}


def test_bench_throughput_repeats_its_workload(tiny: str, tmp_path: Path) -> None:
    rows = []
    for seed in ("7", "7", "8"):
        report = tmp_path / "report.json"
        options = ["--requests", "3", "--prompt-len", "2:60", "--output-len", "1:3", "--engines", "chairlift"]
        result = run("bench", "throughput", "--model", tiny, *FAST, *options, "--seed", seed, "--json", str(report))
        assert result.exit_code == 0, result.output
        rows.append(json.loads(report.read_text())["rows"][0])
    same = [(row["input_tokens"], row["output_tokens"]) for row in rows]
    assert same[0] == same[1] != same[2]
