"""`python -m tests.gpu.measure`: its commands have these options, and its figures are read from their reports."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import typer

from chairlift.cli.main import app
from chairlift_lab.common.model_shapes import SHAPES
from tests.gpu.measure import DRY, ONLY_GPU, command_line, dry_arguments, line, run_part, table
from tests.gpu.measurements import PARTS, Command, Found

COMMANDS = [(part, command) for part, content in PARTS.items() for command in content.commands]


def options(tmp_path: Path, *, dry: bool) -> argparse.Namespace:
    return argparse.Namespace(out=tmp_path, peer_python=Path("vllm/bin/python"), dry=dry, limit=100.0)


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(("part", "command"), COMMANDS, ids=[f"{part}, {command.name}" for part, command in COMMANDS])
def test_commands_are_understood(part: str, command: Command, dry: bool, tmp_path: Path) -> None:
    """Their options are parsed; nothing is run."""
    arguments = command_line(command, options(tmp_path, dry=dry), tmp_path / "report.json")[1:]
    if command.is_tests:
        assert all(Path(each).exists() for each in command.arguments if each.startswith("tests/"))
        return
    assert arguments[:3] == ["-m", "chairlift", "bench"]
    benches: Any = typer.main.get_command(app)
    with benches.make_context("chairlift", ["bench"], resilient_parsing=True) as context:
        group = benches.get_command(context, "bench")
        bench = group.get_command(context, arguments[3])
        parsed = bench.make_context(arguments[3], list(arguments[4:]))
    assert parsed.params["json_file"] is not None
    shape = parsed.params.get("shape") or parsed.params.get("model_config")
    assert dry or shape is None or shape in SHAPES
    if dry:
        assert not ONLY_GPU.keys() & set(arguments)
        assert parsed.params["device"] == "cpu"


def test_names_are_unique_and_every_bench_has_a_tiny_form() -> None:
    for part in PARTS.values():
        names = [command.name for command in part.commands]
        assert len(names) == len(set(names))
        assert all(command.is_tests or command.bench in DRY for command in part.commands)


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows)}


def test_figures() -> None:
    def rows(factor: float) -> dict[str, Any]:
        cases = ("decode-1", "decode-32", "decode-128", "load-256")
        found = [{"name": case, "tokens_per_second": 250.0 * factor, "times_peer": factor} for case in cases]
        return report(*found)

    found = Found({"bf16": rows(1.0), "fp8": rows(1.6), "fp8 KV": rows(2.0)})
    figures = {row["figure"]: row for row in table(PARTS["fp8"].figures, found)}
    assert figures["fp8, decode-1: tokens/s"] | {"figure": ""} == {
        "figure": "", "value": 400.0, "at_least": 430, "at_most": None, "reached": False
    }  # fmt: skip
    assert figures["fp8, decode-32: times vLLM"]["reached"]
    assert figures["fp8 KV, load-256: times fp8"]["value"] == pytest.approx(1.25)
    assert figures["fp8 head, decode-1: times fp8"]["value"] is None
    assert "not measured" in line(figures["fp8 head, decode-1: times fp8"])
    cold = Found({"cold": report({"start": "cold", "streams": 8, "ttft_p99_ms": 900.0, "first_token_seconds": 9.0})})
    figures = {row["figure"]: row for row in table(PARTS["cold"].figures, cold)}
    assert figures["8 streams: TTFT p99 ms"]["reached"] is False
    assert figures["cold: first token s"]["reached"] is True


def test_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports that are there are kept; a failure of one command does not lose the others."""
    ran: list[str] = []

    def run(command: Command, *_: Any) -> dict[str, Any]:
        from tests.gpu.measure import CommandFailed

        ran.append(command.name)
        if command.name == "int4" and len(ran) < 4:
            raise CommandFailed("out of memory")
        return report({"name": "decode-1", "tokens_per_second": 700.0, "times_peer": 1.3})

    monkeypatch.setattr("tests.gpu.measure.run", run)
    assert run_part("int4", options(tmp_path, dry=False)) == 1
    assert run_part("int4", options(tmp_path, dry=False)) == 0
    assert ran == ["gptq", "int4", "int4 head", "int4"]


def test_tiny_forms_leave_out_what_a_cpu_has_not(tmp_path: Path) -> None:
    (command,) = (each for each in PARTS["fp8"].commands if each.name == "fp8 KV")
    arguments = dry_arguments(command, tmp_path)
    assert arguments[:2] == ["shapes", str(tmp_path / "config.json")]
    assert "fp8" not in arguments
