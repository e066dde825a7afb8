"""Logs of servers: simulated beside the times that they measured, and with other settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import InvalidParameter
from chairlift_lab.load.trace_files import load_trace
from chairlift_lab.planning.prediction import ReplicaSettings
from chairlift_lab.planning.what_if import changed, parse_changes
from tests.api.cli_runner import run

MODEL = ("--model", "qwen3-0.6b", "--device", "l4")


def line(at: float, tokens: int, output: int, *, blocks: Sequence[str] = (), **facts: Any) -> str:
    """A line of an access log whose times are not those of any model."""
    completion = {"prompt": 0, "tokens": output, "cached": 0, "queue_ms": 1.0, "ttft_ms": 100.0, "e2e_ms": 900.0}
    return json.dumps(
        {"method": "POST", "path": "/v1/completions", "status": 200, "tenant": "alice", "targets": None}
        | {"time": f"2026-01-31T12:00:{at:06.3f}+00:00", "block_tokens": 16, "priority": 0}
        | {"prompts": [{"tokens": tokens, "blocks": list(blocks)}], "completions": [completion]}
        | facts
    )


def write_log(path: Path, count: int = 30) -> Path:
    lines = [line(index * 0.2, 600, 40, blocks=["aa", f"b{index}"]) for index in range(count)]
    path.write_text("\n".join([*lines, json.dumps({"method": "GET", "path": "/health", "status": 200})]))
    return path


def test_a_log_is_compared_with_what_it_measured_and_with_other_settings(tmp_path: Path) -> None:
    log, out = write_log(tmp_path / "access.jsonl"), tmp_path / "out.json"
    changes = "order=shortest,max_batch_tokens=64"
    outcome = run("simulate", *MODEL, "--log", str(log), "--what-if", changes, "--json", str(out), "--quiet")
    assert outcome.exit_code == 0, outcome.output
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    ttft = rows["TTFT mean, ms"]
    assert ttft["measured"] == pytest.approx(100)
    assert ttft["error"] == pytest.approx(ttft["as_is"] / 100 - 1)
    (other,) = ttft["what_if"]
    assert other["settings"] == changes
    assert other["value"] > ttft["as_is"], "chunks of 64 tokens take longer"
    plain = tmp_path / "plain.json"
    options = ("--order", "shortest", "--max-batch-tokens", "64", "--json", str(plain))
    run("simulate", *MODEL, "--log", str(log), *options, "--quiet")
    again = {row["name"]: row["as_is"] for row in json.loads(plain.read_text())["rows"]}
    assert again["TTFT mean, ms"] == other["value"]


def test_what_if_needs_no_measured_times(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--rate", "30", "--requests", "40", "--what-if", "policy=static", "--what-if", "max-batch-requests=2")
    outcome = run("simulate", *MODEL, *options, "--json", str(out), "--quiet")
    assert outcome.exit_code == 0, outcome.output
    (row,) = (row for row in json.loads(out.read_text())["rows"] if row["name"] == "TTFT p50, ms")
    assert row["measured"] is None
    assert [other["change"] > 0 for other in row["what_if"]] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--what-if", "order"), "must be name=value"),
        (("--what-if", "device=h100"), "must be name=value"),
        (("--what-if", "order=fastest"), "unknown 'fastest'"),
        (("--what-if", "max_batch_tokens=0"), "must be at least 1"),
        (("--what-if", "max_batch_tokens=many"), "max_batch_tokens cannot be 'many'"),
        (("--what-if", "order=fcfs,order=edf"), "order is there twice"),
        (("--log", "LOG", "--trace", "LOG"), "was given together with trace"),
        (("--log", "LOG", "--copies", "2"), "does not go with --log"),
        (("--log", "BARE"), "has no measured times"),
        (("--log", "missing.jsonl"), "cannot read"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: Sequence[str], problem: str, tmp_path: Path) -> None:
    write_log(tmp_path / "LOG.jsonl")
    (tmp_path / "BARE.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}')
    arguments = [str(tmp_path / f"{each}.jsonl") if each in ("LOG", "BARE") else each for each in arguments]
    outcome = run("simulate", *MODEL, *arguments)
    assert outcome.exit_code == 2
    assert problem in " ".join(outcome.output.split())


def test_another_order_brings_its_own_budget() -> None:
    settings = ReplicaSettings(num_blocks=100, budget="knee")
    assert changed(settings, parse_changes("order=slack")).budget is None
    assert changed(settings, parse_changes("max_batch_requests=3")).slots == 3
    both = changed(settings, parse_changes("order=slack,budget=fixed,prefix_caching=true"))
    assert (both.budget, both.prefix_caching) == ("fixed", True)


# ---- the files --------------------------------------------------------------------------------------------------


def test_the_access_log_has_what_a_simulation_needs(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    second = line(3.0, 40, 1, blocks=["aa", "cc"], targets={"ttft_ms": 500.0}, tenant=None)
    refused = line(1.0, 5, 0)
    log.write_text("\n".join([second, line(1.0, 33, 5, blocks=["aa", "bb"]), refused]))
    entries = load_trace(log)
    assert [(entry.at, entry.n_in, entry.n_out, entry.tenant) for entry in entries] == [
        (0.0, 33, 5, "alice"),
        (2.0, 40, 1, ""),
    ]
    assert [entry.blocks for entry in entries] == [(0, 2), (0, 1)]
    assert {entry.block_tokens for entry in entries} == {16}
    assert [str(entry.targets) for entry in entries] == ["", "ttft:500"]
    measured = entries[0].measured
    assert measured is not None
    assert (measured.ttft, measured.tpot) == (0.1, pytest.approx(0.2))


DYNAMO = {
    "schema": "dynamo.request.trace.v1",
    "event_type": "request_end",
    "event_time_unix_ms": 1_010,
    "request": {
        "request_id": "a",
        "output_tokens": 7,
        "request_received_ms": 1_000,
        "ttft_ms": 30.0,
        "total_time_ms": 90.0,
        "replay": {"trace_block_size": 4, "input_length": 10, "input_sequence_hashes": [2**63 + 5, 7, 9]},
    },
}


def test_dynamo_traces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    later = json.loads(json.dumps(DYNAMO))
    later["request"]["request_received_ms"] = 3_500
    later["request"]["replay"]["input_sequence_hashes"] = [2**63 + 5, 7, 11]
    others = [{"event_type": "tool_end", "tool": {}}, {"timestamp": 5, "event": later}]
    file.write_text("\n".join(map(json.dumps, [DYNAMO, *others])))
    first, second = load_trace(file)
    assert (first.at, first.n_in, first.n_out, first.blocks, first.block_tokens) == (0.0, 10, 7, (0, 1, 2), 4)
    assert (second.at, second.blocks) == (2.5, (0, 1, 3))
    assert first.measured is not None
    assert first.measured.tpot == pytest.approx(0.01)


def test_traces_of_llmservingsim_share_equal_beginnings(tmp_path: Path) -> None:
    tokens = list(range(40))
    rows = [
        {"input_toks": 40, "output_toks": 3, "arrival_time_ns": 2_000_000_000, "input_tok_ids": tokens},
        {"input_toks": 33, "output_toks": 4, "arrival_time_ns": 3_000_000_000, "input_tok_ids": [*tokens[:31], 9, 9]},
        {"input_toks": 50, "output_toks": 4, "arrival_time_ns": 2_500_000_000},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    first, bare, second = load_trace(file)
    assert (first.blocks, second.blocks, bare.blocks) == ((0, 1), (0, 2), ())
    assert [entry.at for entry in (first, bare, second)] == [0.0, 0.5, 1.0]


def test_a_packed_trace_is_read(tmp_path: Path) -> None:
    import gzip

    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(DYNAMO).encode()))
    assert len(load_trace(file)) == 1
    file.write_bytes(b"no gzip")
    with pytest.raises(InvalidParameter, match="trace: cannot read"):
        load_trace(file)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"event_type": "request_end", "request": {"request_id": "a"}}, "line 1 of"),
        ({"session_id": "a", "arrival_time_ns": 0, "sub_requests": []}, "a session"),
        ({"input_toks": 2, "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": [1]}, "there are 1 input_tok_ids"),
        ({"input_toks": 2, "output_toks": 1}, "has no 'arrival_time_ns'"),
        ({"method": "POST", "completions": [{"tokens": 1, "prompt": 0}], "prompts": []}, "line 1 of"),
    ],
)
def test_a_bad_line_of_each_format_is_named(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(InvalidParameter, match=f"trace: .*{problem}"):
        load_trace(file)
