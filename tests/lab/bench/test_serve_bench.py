"""Arrivals, traces and figures of a load, checked by hand and by their laws."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import InvalidParameter
from chairlift_lab.bench.serve import turns
from chairlift_lab.common.workload import LengthRange, SharedPrefixes, draw_requests
from chairlift_lab.load.client import LoadRecord, LoadRun
from chairlift_lab.load.figures import (
    SLICES,
    LatencyLimits,
    in_flight,
    load_row,
    open_over_time,
    plot_load,
    tokens_over_time,
)
from chairlift_lab.load.trace_files import TraceEntry, load_trace
from chairlift_lab.load.traces import Arrivals, trace_requests

VOCABULARY = range(100, 200)

# ---- arrivals ----------------------------------------------------------------------------------------------------


def gaps(rate: float, kind: str, burstiness: float | None = None, seed: int = 0) -> list[float]:
    times = list(islice(Arrivals.parse(rate, kind, burstiness).times(seed), 20_001))
    assert times[0] == 0.0
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(
    ("kind", "burstiness", "variation"),
    [
        ("poisson", None, 1.0),
        ("uniform", None, 0.0),
        ("bursty", None, 2.0),
        ("bursty", 0.5, 2**0.5),
        ("bursty", 4, 0.5),
    ],
)
def test_arrivals_have_their_rate_and_their_variation(kind: str, burstiness: float | None, variation: float) -> None:
    found = gaps(4.0, kind, burstiness)
    assert min(found) >= 0
    assert statistics.mean(found) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.06, abs=1e-6)


def test_poisson_arrivals_have_no_memory() -> None:
    """The variance of the requests per second equals their mean; with bursts it is far larger."""

    def dispersion(kind: str) -> float:
        counts = [0] * 1000
        for time in islice(Arrivals.parse(10.0, kind, None).times(1), 20_000):
            if time < 1000:
                counts[int(time)] += 1
        return statistics.pvariance(counts) / statistics.mean(counts)

    assert dispersion("poisson") == pytest.approx(1.0, rel=0.15)
    assert dispersion("bursty") > 2.5


def test_the_seed_determines_arrivals() -> None:
    assert gaps(1.0, "poisson", seed=1) == gaps(1.0, "poisson", seed=1) != gaps(1.0, "poisson", seed=2)


# ---- workloads ---------------------------------------------------------------------------------------------------


@given(share=st.floats(0, 1), groups=st.integers(1, 4), seed=st.integers(0, 1000))
def test_prompts_share_the_given_part(share: float, groups: int, seed: int) -> None:
    drawn = draw_requests(
        range(10**6),
        prompt_len=LengthRange(30, 90),
        output_len=LengthRange(1, 3),
        seed=seed,
        shared=SharedPrefixes(share, groups),
    )
    requests = list(islice(drawn, 25))
    beginnings: list[tuple[int, ...]] = []
    for request in requests:
        common = round(len(request.prompt_ids) * share)
        beginning, own = request.prompt_ids[:common], request.prompt_ids[common:]
        known = [other for other in beginnings if other[: min(8, common)] == beginning[: min(8, common)]]
        if common >= 8 and not known:
            beginnings.append(beginning)
        assert all(
            own[:8] != other.prompt_ids[common : common + 8] for other in requests if other is not request and own
        )
    assert len(beginnings) <= groups


def test_a_share_of_zero_changes_nothing() -> None:
    lengths = {"prompt_len": LengthRange(5, 9), "output_len": LengthRange(1, 3), "seed": 1}
    plain = draw_requests(VOCABULARY, **lengths)  # type: ignore[arg-type]
    alone = draw_requests(VOCABULARY, shared=SharedPrefixes(0.0, 3), **lengths)  # type: ignore[arg-type]
    assert list(islice(plain, 20)) == list(islice(alone, 20))


# ---- traces ------------------------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:49,0,0
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 2500, "input_length": 1024, "output_length": 6, "hash_ids": [1, 2]}

{"timestamp": 2500, "input_length": 700, "output_length": 7, "hash_ids": [1, 9]}
"""


def test_azure_traces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    first, second, third = load_trace(file)
    assert first == TraceEntry(0.0, 374, 44)
    assert second == TraceEntry(pytest.approx(2.3194, abs=1e-4), 1, 1)  # an empty one still is a request
    assert third == TraceEntry(pytest.approx(4.314579, abs=1e-5), 396, 109)


def test_times_may_have_zones_or_be_numbers(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "timestamp, contexttokens ,GeneratedTokens,Other\n"
        "2024-05-10 00:00:00.009930+00:00,5,6,x\n2024-05-10T02:00:01.009930+02:00,7,8,y\n"
    )
    assert [entry.at for entry in load_trace(file)] == [0.0, pytest.approx(1.0)]
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n10.5,5,6\n12,7,8\n")
    assert [entry.at for entry in load_trace(file)] == [0.0, 1.5]


def test_mooncake_traces_share_their_blocks(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    entries = load_trace(file)
    assert [(entry.at, entry.n_in, entry.n_out) for entry in entries] == [(0, 1100, 5), (1.5, 1024, 6), (1.5, 700, 7)]
    long, same, other = trace_requests(VOCABULARY, entries, seed=0)
    assert [len(one.prompt_ids) for one in (long, same, other)] == [1100, 1024, 700]
    assert long.prompt_ids[:1024] == same.prompt_ids
    assert other.prompt_ids[:512] == same.prompt_ids[:512]
    assert other.prompt_ids[512:600] != same.prompt_ids[512:600]
    assert [one.n_out for one in (long, same, other)] == [5, 6, 7]
    again = next(trace_requests(VOCABULARY, entries, seed=0))
    assert again == long != next(trace_requests(VOCABULARY, entries, seed=1))


def test_a_scaled_trace_keeps_common_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    entries = [entry.scaled(0.1, 2.0) for entry in load_trace(file)]
    assert [(entry.at, entry.n_in, entry.n_out) for entry in entries] == [(0, 110, 1), (0.75, 102, 1), (0.75, 70, 1)]
    long, same, other = trace_requests(VOCABULARY, entries, seed=0, lengths=0.1)
    assert long.prompt_ids[:102] == same.prompt_ids
    assert other.prompt_ids[:51] == same.prompt_ids[:51]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "", "has no column timestamp"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("a.csv", "TIMESTAMP,ContextTokens\n1,2\n", "has no column generatedtokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,2,3\n", "line 2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,-2,3\n", "line 2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnan,2,3\n", "line 2"),
        ("a.jsonl", "{", "line 1"),
        ("a.jsonl", "\n[1]\n", "line 2"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 3}', "has no 'output_length'"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path: Path, name: str, content: str, problem: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(InvalidParameter, match=f"trace: .*{problem}"):
        load_trace(file)


# ---- figures -----------------------------------------------------------------------------------------------------


def record(sent: float, times: list[float], end: float, tokens: int | None = None, **more: object) -> LoadRecord:
    return LoadRecord(sent, sent, times, end, 10, len(times) if tokens is None else tokens, **more)  # type: ignore[arg-type]


RUN = LoadRun(
    4.0,
    [
        record(0.0, [1.0, 1.5, 2.0], 2.0),
        record(0.5, [0.75], 1.0, tokens=1),
        record(1.0, [3.0, 4.0], 4.0, tokens=5),  # several tokens in a piece
        record(1.0, [2.0], 3.0, error="HTTP 500 server_error"),
        record(2.0, [], 2.5, error="timeout"),
    ],
    {"client": 0.5, "front_end": 0.0},
)


def test_the_figures_of_a_run_by_hand() -> None:
    row = load_row("server", [RUN], LatencyLimits())
    assert (row["requests"], row["completed"]) == (5, 3)
    assert row["errors"] == {"HTTP 500 server_error": 1, "timeout": 1}
    assert (row["input_tokens"], row["output_tokens"]) == (30, 9)
    assert (row["output_tokens_per_s"], row["total_tokens_per_s"], row["requests_per_s"]) == (2.25, 9.75, 0.75)
    assert row["ttft_mean_ms"] == pytest.approx((1000 + 250 + 2000) / 3)
    assert row["ttft_p50_ms"] == pytest.approx(1000)
    assert row["ttft_p95_ms"] == pytest.approx(1900)
    assert row["tpot_mean_ms"] == pytest.approx((500 + 250) / 2)  # a single token has none
    assert row["itl_mean_ms"] == pytest.approx((500 + 500 + 1000) / 3)
    assert row["e2e_p50_ms"] == pytest.approx(2000)
    assert row["e2e_p99_ms"] == pytest.approx(2980)
    assert row["peak_concurrency"] == 3  # at 1.0, two begin as one ends
    assert row["goodput_per_s"] == 0.75


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (LatencyLimits(max_ttft_ms=1000), 2),
        (LatencyLimits(max_ttft_ms=999), 1),
        (LatencyLimits(max_tpot_ms=250), 2),  # an answer of one token meets any
        (LatencyLimits(max_e2e_ms=2000), 2),
        (LatencyLimits(max_ttft_ms=1000, max_tpot_ms=250), 1),
        (LatencyLimits(max_ttft_ms=1, max_tpot_ms=1, max_e2e_ms=1), 0),
    ],
)
def test_a_good_answer_meets_all_limits(limits: LatencyLimits, good: int) -> None:
    row = load_row("server", [RUN], limits)
    assert row["goodput_per_s"] == good / 4
    assert row["goodput_share"] == good / 5  # a failed one is not good


def test_several_runs_are_taken_together() -> None:
    one, two = load_row("server", [RUN], LatencyLimits()), load_row("server", [RUN, RUN], LatencyLimits())
    same = ("output_tokens_per_s", "ttft_p50_ms", "peak_concurrency", "goodput_share")
    assert [one[name] for name in same] == [two[name] for name in same]
    assert two["seconds"] == 8.0
    assert two["cpu_seconds"] == {"client": 1.0, "front_end": 0.0}
    assert (one["runs"], two["runs"]) == (1, 2)


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    row = load_row("server", [LoadRun(1.0, [record(0.0, [], 1.0, error="timeout")])], LatencyLimits())
    assert row["output_tokens_per_s"] == 0
    assert {row[f"{name}_{figure}_ms"] for name in ("ttft", "tpot", "itl", "e2e") for figure in ("mean", "p99")} == {
        None
    }


def test_turns_alternate() -> None:
    assert list(turns(3)) == ["server", "offline", "offline", "server", "server", "offline"]


# ---- plots -------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.lists(st.floats(0, 9), min_size=1, max_size=5), st.integers(1, 50)), min_size=1
    )
)
def test_what_is_drawn_over_time_adds_up(requests: list[tuple[float, list[float], int]]) -> None:
    records = [record(sent, sorted(sent + gap for gap in gaps), sent + 9, tokens) for sent, gaps, tokens in requests]
    run = LoadRun(max(one.end for one in records), records)
    width = run.seconds / SLICES
    assert sum(tokens_over_time(run, width)) * width == pytest.approx(sum(one.output_tokens for one in records))
    assert sum(open_over_time(records, width)) * width == pytest.approx(sum(one.end - one.sent for one in records))
    assert max(open_over_time(records, width)) <= max(count for _, count in in_flight(records)) + 1e-6


def test_a_plot_is_written(tmp_path: Path) -> None:
    file = tmp_path / "load.png"
    plot_load(file, "a load", "a machine", {"server": [RUN, RUN], "offline": [RUN]}, LatencyLimits(max_ttft_ms=100))
    assert file.read_bytes().startswith(b"\x89PNG")
