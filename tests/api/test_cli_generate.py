"""`chairlift generate`: prompts in, completions out."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.api.cli_runner import FAST, run, start


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


@pytest.mark.parametrize("arguments", [[], ["-"], [""]])
def test_a_missing_prompt_is_reported_before_anything_is_loaded(arguments: list[str]) -> None:
    result = run("generate", *arguments, "--model", "/no/such/model", stdin="")
    assert result.exit_code == 2
    assert "prompt: is " in result.output


def test_texts_are_printed_under_their_prompts(tiny: str) -> None:
    options = ["--model", tiny, "--max-tokens", "3", "--temperature", "0", *FAST]
    alone = run("generate", "a chairlift", "--verbose", *options)
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
