"""The command line, as its users meet it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from chairlift import EngineConfig, SamplingParams, __version__
from chairlift.cli.chat import _typed_lines
from chairlift.cli.main import app
from chairlift.core.events import RequestFinished
from chairlift.core.request import Ending, FinishReason
from chairlift.errors import ChairliftError
from chairlift.lab.bench.base import BENCHES
from chairlift.options.declaration import options_of
from chairlift.server.options import ServerOptions
from chairlift.terminal.answer_meter import AnswerMeter
from chairlift.terminal.console import note, show_error, write_text
from chairlift.terminal.options import EngineOptions, SamplingOptions
from tests.tiny import write_tiny_checkpoint

COMMANDS = [
    [],
    ["generate"],
    ["chat"],
    ["serve"],
    ["simulate"],
    ["plan"],
    ["batch"],
    ["explain"],
    ["train-draft"],
    ["record"],
    ["profile"],
    ["models"],
    ["bench"],
    *(["bench", name] for name in BENCHES.names()),
]
FAST = ["--device", "cpu", "--kv-memory", "4MiB"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def run(*arguments: str, stdin: str = "", **variables: str) -> Any:
    return CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "200", **variables})


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """In a process of its own, with one thread: there is little to compute and much to share the machine with."""
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    program = "from chairlift.cli.main import main; main()"
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=os.environ | threads, **options)


# ---- help -------------------------------------------------------------------------------------------------------


def find_command(words: list[str]) -> Any:
    command: Any = get_command(app)
    for word in words:
        command = command.get_command(None, word)
    return command


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_lists_every_option_and_examples(words: list[str]) -> None:
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert result.stdout.count("chairlift " + " ".join(words)) >= 2, "usage and an example"
    for parameter in find_command(words).params:
        assert parameter.help, f"{parameter.name} has no help"
        if parameter.param_type_name == "option":
            assert all(name in result.stdout for name in (*parameter.opts, *parameter.secondary_opts))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_at_80_columns_shows_whole_flags_on_one_line(words: list[str]) -> None:
    result = run(*words, "--help", COLUMNS="80")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for parameter in find_command(words).params:
        if parameter.param_type_name == "option":
            flags = (*parameter.opts, *parameter.secondary_opts)
            starts = [line.split() for line in lines if line.startswith("  -")]
            assert any(all(flag in {word.strip(",") for word in start} for flag in flags) for start in starts), flags


def test_help_shows_options_in_groups() -> None:
    lines = run("serve", "--help", COLUMNS="80").stdout.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    groups = {option.group for group in (EngineConfig, ServerOptions) for option in options_of(group)}
    assert {f"{group}:" for group in groups} < set(headings)
    assert lines.index("KV cache:") < next(i for i, line in enumerate(lines) if line.startswith("  --kv-memory"))


def test_the_commands_are_all_tested_here() -> None:
    command: Any = get_command(app)
    assert sorted(command.commands) == sorted({words[0] for words in COMMANDS if words})


def test_version() -> None:
    assert run("--version").stdout.strip() == f"chairlift {__version__}"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["bench", "--help"], ["bench", "throughput", "--help"], ["bench", "serve", "--help"], ["--version"]],
    ids=" ".join,
)
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    program = (
        "import sys, chairlift.cli.main\n"
        "try:\n    chairlift.cli.main.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'numba'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_options_mirror_the_engine_and_the_sampler() -> None:
    def defaults(group: Any) -> dict[str, Any]:
        return {field.name: field.default for field in fields(group)}

    engine = defaults(EngineOptions)
    del engine["model"], engine["quiet"]
    assert engine == defaults(EngineConfig)
    assert set(defaults(SamplingOptions)) < set(defaults(SamplingParams))


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
def test_an_error_found_with_the_model_at_hand_is_one_line_too(tiny: str, arguments: list[str], expected: str) -> None:
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


# ---- generate ---------------------------------------------------------------------------------------------------


def generate_json(*arguments: str, stdin: str = "") -> list[dict[str, Any]]:
    result = run("generate", *arguments, *FAST, "--json", "--quiet", stdin=stdin)
    assert result.exit_code == 0, result.output
    assert not result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generate_json(tiny: str) -> None:
    options = ["--model", tiny, "--max-tokens", "5", "--ignore-eos", "--temperature", "0", "--n", "2"]
    lines = generate_json("a chairlift", "many sequences", *options)
    assert [(line["prompt_index"], line["index"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [line["prompt"] for line in lines] == ["a chairlift"] * 2 + ["many sequences"] * 2
    for line in lines:
        assert line["finish_reason"] == "length"
        assert line["num_tokens"] == 5
        assert line["num_prompt_tokens"] > 0
        assert line["metrics"]["time_to_first_token"] <= line["metrics"]["end_to_end"]
    assert lines[0]["text"] == lines[1]["text"]


def test_options_reach_the_sampler(tiny: str) -> None:
    options = ["--model", tiny, "--max-tokens", "6", "--ignore-eos", "--temperature", "5"]
    first, again, other = (generate_json("a chairlift", *options, "--seed", seed)[0] for seed in ("1", "1", "2"))
    assert first["text"] == again["text"] != other["text"]
    greedy = generate_json("a chairlift", *options, "--temperature", "0")[0]
    stopped = generate_json("a chairlift", *options, "--temperature", "0", "--stop", greedy["text"][1:3])[0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == greedy["text"][: greedy["text"].index(greedy["text"][1:3])]


def test_prompts_come_from_arguments_files_and_standard_input(tiny: str, tmp_path: Path) -> None:
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("one\n\n{two}\n")
    objects.write_text('{"prompt": "one"}\n{"prompt": "two\\nlines", "cache_salt": "x"}\n')
    options = ["--model", tiny, "--max-tokens", "1", "--temperature", "0"]

    def prompts(*arguments: str, stdin: str = "") -> list[str]:
        return [line["prompt"] for line in generate_json(*arguments, *options, stdin=stdin)]

    assert prompts(stdin="from a pipe\n") == ["from a pipe"]
    assert prompts("one", "-", stdin="two") == ["one", "two"]
    assert prompts("--file", str(lines)) == ["one", "{two}"]
    assert prompts("--file", str(objects)) == ["one", "two\nlines"]


@pytest.mark.parametrize("content", ["", "\n\n", "no json\n", "[1]\n", '{"text": "hi"}\n', '{"prompt": 3}\n'])
def test_a_bad_prompt_file_is_refused_before_anything_is_loaded(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    result = run("generate", "--file", str(file), "--model", "nowhere")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --file: ")


def test_texts_are_printed_under_their_prompts(tiny: str) -> None:
    options = ["--model", tiny, "--max-tokens", "3", "--temperature", "0", *FAST]
    alone = run("generate", "a chairlift", *options)
    both = run("generate", "a chairlift", "b", *options)
    assert f"── 1  a chairlift\n{alone.stdout}── 2  b\n" in both.stdout
    assert "KV cache" in alone.stderr


def test_a_single_prompt_on_a_terminal_is_streamed(tiny: str) -> None:
    command = ["generate", "a chairlift", "--model", tiny, "--temperature", "0", "--max-tokens", "4", *FAST]
    expected = run(*command).stdout
    ours, theirs = pty.openpty()
    process = start(*command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    notes = process.communicate(timeout=120)[1].decode()
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert process.returncode == 0
    visible = "".join(character for character in expected if character.isprintable())
    assert "".join(character for character in shown if character.isprintable()) == visible
    assert re.search(r"4 tokens at .* tokens/s · first after .* · prompt of \d+ tokens, 0 of them cached", notes)


def test_a_model_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        monkeypatch.setattr(sys, "stdout", stream)
        write_text("a\x1b[31m\tb\n\x07é\x9bc")
    assert terminal.getvalue() == "a[31m\tb\néc"
    assert pipe.getvalue() == "a\x1b[31m\tb\n\x07é\x9bc"


@pytest.mark.parametrize("show", [note, show_error])
def test_nor_can_an_error_that_quotes_its_files(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    show("unexpected tensor \x1b]0;pwned\x07")
    shown = capsys.readouterr().err
    assert "unexpected tensor ]0;pwned" in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_a_failed_answer_is_an_error() -> None:
    meter = AnswerMeter()
    meter([RequestFinished(1.0, "a", Ending(FinishReason.STOP))])
    meter.check()
    meter([RequestFinished(1.0, "a", Ending(FinishReason.ERROR, "no finite scores"))])
    with pytest.raises(ChairliftError, match="no finite scores"):
        meter.check()


def test_a_terminal_without_utf8_still_gets_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    program = "from chairlift.cli import main; main.app = lambda **options: print('na\u00efve'); main.main()"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"na?ve\n"


# ---- chat -------------------------------------------------------------------------------------------------------

CHAT = ["--max-tokens", "4", "--ignore-eos", "--temperature", "0", *FAST]


def cached_tokens(notes: str) -> list[tuple[int, int]]:
    """For each answer, the tokens of its prompt and how many of them were cached."""
    found = re.findall(r"prompt of (\d+) tokens, (\d+) of them cached", notes)
    return [(int(prompt), int(cached)) for prompt, cached in found]


def test_chat_remembers_and_reuses_the_conversation(tiny: str) -> None:
    result = run("chat", "--model", tiny, *CHAT, stdin="a chairlift never stops\nand neither does the engine\n")
    assert result.exit_code == 0, result.output
    (first, nothing), (second, cached) = cached_tokens(result.stderr)
    assert nothing == 0
    assert second > first
    assert cached == first // 16 * 16 > 0
    assert result.stderr.count("cut off at --max-tokens") == 2


def test_chat_commands(tiny: str) -> None:
    said = ["hello", "/system be brief", "hello", "/reset", "hello", "/system", "hello", "/dance", "/help", "/quit"]
    result = run("chat", "--model", tiny, *CHAT, stdin="\n".join([*said, "never read"]))
    assert result.exit_code == 0, result.output
    plain, system, anew, *rest = [prompt for prompt, _ in cached_tokens(result.stderr)]
    assert plain < anew < system
    assert len(rest) == 1
    assert "There is no /dance" in result.stderr
    assert "/system TEXT" in result.stderr


def test_quiet_chat_prints_answers_only(tiny: str) -> None:
    result = run("chat", "--model", tiny, *CHAT, "--quiet", stdin="hello\n")
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert not result.stderr


def test_a_message_that_does_not_fit_ends_a_piped_chat(tiny: str) -> None:
    result = run("chat", "--model", tiny, *CHAT, "--quiet", stdin="word " * 300 + "\nhello\n")
    assert result.exit_code == 2
    assert "error: prompt: has" in result.stderr


def test_a_model_that_cannot_chat_says_so_at_once(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    result = run("chat", "--model", str(folder), *CHAT, "--quiet", stdin="")
    assert result.exit_code == 2
    assert "error: --model: it has no chat template" in result.stderr


def test_chat_needs_no_readline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)  # importing it fails
    monkeypatch.setattr(sys, "stdin", io.StringIO(" hello \n"))
    assert list(_typed_lines()) == ["hello"]


@pytest.fixture
def chatting(tiny: str) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    options = ["--model", tiny, "--ignore-eos", "--max-tokens", "200", *FAST]
    with start("chat", *options, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        yield process
        process.kill()


def test_ctrl_c_stops_the_answer_but_not_the_chat(chatting: subprocess.Popen[bytes]) -> None:
    assert chatting.stdin is not None
    assert chatting.stdout is not None
    chatting.stdin.write(b"hello\n")
    chatting.stdin.flush()
    chatting.stdout.read(1)
    chatting.send_signal(signal.SIGINT)
    output, notes = chatting.communicate(b"/reset\nagain\n", timeout=120)
    assert chatting.returncode == 0, notes
    counts = [int(count) for count in re.findall(rb"(\d+) tokens at", notes)]
    assert len(counts) == 2
    assert counts[0] < 200 == counts[1]
    assert " …\n".encode() in output


def test_ctrl_c_between_answers_exits_with_130(chatting: subprocess.Popen[bytes]) -> None:
    assert chatting.stderr is not None
    while b"step " not in chatting.stderr.readline():  # the last line of the start-up log
        pass
    chatting.send_signal(signal.SIGINT)
    _, notes = chatting.communicate(timeout=120)
    assert chatting.returncode == 130
    assert b"Traceback" not in notes


# ---- models and bench -------------------------------------------------------------------------------------------


def test_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run("models", CHAIRLIFT_CACHE=str(tmp_path))
    assert result.exit_code == 0
    for expected in ("smollm2-135m", "Apache-2.0", "98 MB", "fetched on first use", "Llama", "gguf", "safetensors"):
        assert expected in result.stdout
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
