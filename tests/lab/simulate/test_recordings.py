"""Recordings of vLLM: the kernel times that steps are predicted from, its scheduler, and the files."""

from __future__ import annotations

import csv
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.core.cost_model import StepShape, chunk_kv
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.plan import StepResult
from chairlift_lab.planning.prediction import trace_arrivals
from chairlift_lab.planning.served_recording import ServedRecording
from chairlift_lab.simulator.kernel_times import Curve, Experts, Grid, KernelTimes
from chairlift_lab.simulator.outcome import RequestRecord, latencies
from chairlift_lab.simulator.replica import Replica
from chairlift_lab.simulator.scheduler import SimulatedRequest, token_of
from chairlift_lab.simulator.together import simulate_together
from tests.lab.simulate.test_simulation import make_replica

LAYERS = 32  # those of the published shape that the recording names
LINEAR = {"qkv_proj": 3.0, "layernorm": 1.0, "embedding": 0.5}
CHUNKS, CONTEXTS, DECODES = (0, 16, 64), (0, 16, 64, 256), (0, 1, 4, 16)


def attention(chunk: int, context: int, decodes: int, kv: int) -> float:
    """Microseconds of one layer."""
    return chunk * 0.5 + chunk * context * 0.01 + decodes * kv * 0.02 + decodes


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_kernels(folder: Path) -> None:
    sizes = [1, 4, 16, 64]
    dense = [
        {"layer": name, "tokens": size, "time_us": 10 + each * size} for name, each in LINEAR.items() for size in sizes
    ]
    write_rows(folder / "dense.csv", dense)
    rows = [{"layer": "lm_head", "sequences": size, "time_us": 100 + size} for size in sizes]
    write_rows(folder / "per_sequence.csv", rows)
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    points = [
        (chunk, context, decodes, kv)
        for chunk, context, decodes, kv in product(CHUNKS, CONTEXTS, DECODES, CONTEXTS)
        if (chunk or not context) and bool(decodes) == bool(kv) and (chunk or decodes)
    ]
    write_rows(
        folder / "attention.csv",
        [dict(zip(names, point, strict=True)) | {"time_us": attention(*point)} for point in points],
    )


def by_hand(tokens: int, sequences: int, attention_us: float) -> float:
    """Seconds of a step; a layer has two norms, and the embedding is outside of the layers."""
    layer = (10 + 3.0 * tokens) + 2 * (10 + 1.0 * tokens) + attention_us
    return 1e-6 * (LAYERS * layer + 10 + 0.5 * tokens + 100 + sequences)


@pytest.fixture
def cost(tmp_path: Path) -> KernelTimes:
    write_kernels(tmp_path)
    return KernelTimes.load(tmp_path, LAYERS)


@pytest.mark.parametrize(
    ("chunk", "context", "decodes", "kv"),
    [(0, 0, 4, 64), (0, 0, 4, 100), (0, 0, 10, 40), (16, 0, 0, 0), (40, 100, 0, 0), (16, 16, 4, 64), (50, 30, 9, 200)],
)
def test_a_step_is_the_sum_of_its_kernels(cost: KernelTimes, chunk: int, context: int, decodes: int, kv: int) -> None:
    """The times above are linear along each size, and so is the interpolation between the measured points."""
    prefill_kv = chunk_kv(context, chunk) if chunk else 0
    shape = StepShape(decodes, chunk, decodes * kv, prefill_kv, decodes + bool(chunk))
    expected = by_hand(chunk + decodes, decodes + bool(chunk), attention(chunk, context, decodes, kv))
    assert cost.predict(shape) == pytest.approx(expected)


def test_steps_of_decodes_are_those_of_single_predictions(cost: KernelTimes) -> None:
    expected = [cost.predict(StepShape(3, 0, read, 0, 3)) for read in range(50, 50 + 3 * 200, 3)]
    assert cost.decode_steps(3, 0, 50, 200) == expected
    assert expected == sorted(expected)


def test_a_curve_goes_on_beyond_its_last_point() -> None:
    curve = Curve({1: 5.0, 3: 9.0, 4: 12.0})
    assert [curve.at(size) for size in (0, 1, 2, 4, 6)] == [5.0, 5.0, 7.0, 12.0, 18.0]


def test_a_mixture_costs_what_the_experts_in_use_cost(tmp_path: Path) -> None:
    write_kernels(tmp_path)
    rows = [
        {"ep": ep, "tokens": tokens, "activated_experts": experts, "time_us": 100 * ep * experts}
        for ep, tokens, experts in product((1, 2), (1, 64), (1, 4))
    ]
    write_rows(tmp_path / "moe.csv", rows)
    plain, mixture = (KernelTimes.load(tmp_path, LAYERS, experts) for experts in (None, Experts(4, 1)))
    shape = StepShape(decode_tokens=2, decode_kv=32, requests=2)
    in_use = 4 * (1 - 0.75**2)
    assert mixture.predict(shape) - plain.predict(shape) == pytest.approx(LAYERS * 100 * in_use * 1e-6)


# ---- the scheduler ----------------------------------------------------------------------------------------------


def step(replica: Replica, now: float) -> list[tuple[str, int]]:
    """Plan and end one step; return what it computed of which request."""
    scheduler = replica.scheduler
    plan = scheduler.schedule(now)
    check_accounting(scheduler)
    computed = [(chunk.request.id, chunk.count) for chunk in plan.chunks]
    tokens = [token_of(chunk.request) for chunk in plan.chunks if chunk.samples]
    scheduler.apply(StepResult(plan, tokens, [None] * len(tokens)), now)
    scheduler.record_events()
    check_accounting(scheduler)
    return computed


def submit(replica: Replica, n_in: int, n_out: int) -> None:
    order = replica.scheduler.take_place()
    record = RequestRecord(0.0, n_in, n_out, 0)
    replica.scheduler.enter(SimulatedRequest(record, range(1000 * order, 1000 * order + n_in), order))


def test_vllm_admits_without_room_to_grow_and_preempts_the_latest() -> None:
    replica = make_replica(kind="vllm", num_blocks=4, budget=64, fast_forward=False)
    submit(replica, 30, 20)
    submit(replica, 32, 20)
    assert step(replica, 0) == [("0", 30), ("1", 32)]  # All four blocks are taken; our policy would wait.
    assert step(replica, 1) == [("0", 1)]  # The second needs a block, and it is the latest.
    assert replica.scheduler.preemptions == 1
    assert step(replica, 2) == [("0", 1)]  # The first takes a third block; three do not fit for the second.
    for now in range(3, 60):
        step(replica, now)
    check_quiescent(replica.scheduler)


def test_vllm_continues_a_prompt_before_it_admits_another() -> None:
    replica = make_replica(kind="vllm", budget=16, fast_forward=False)
    for n_in in (10, 40, 8):
        submit(replica, n_in, 4)
    assert step(replica, 0) == [("0", 10), ("1", 6)]
    assert step(replica, 1) == [("0", 1), ("1", 15)]
    assert step(replica, 2) == [("0", 1), ("1", 15)]
    assert step(replica, 3) == [("0", 1), ("1", 4), ("2", 8)]


# ---- the files --------------------------------------------------------------------------------------------------

META = {
    "model": "meta-llama/Llama-3.1-8B",
    "engine_kwargs": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    "kv_cache": {"num_gpu_blocks": 31, "block_size": 16, "enable_prefix_caching": True},
    "scheduler_config": {"policy": "fcfs", "enable_chunked_prefill": True},
    "hardware": {"device_total_memory_bytes": 24 * 2**30},
}
MACHINE = {
    "link_bw": 16,
    "link_latency": 1000,
    "nodes": [{"instances": [{"npu_mem": {"mem_size": 24, "mem_util": 0.9}, "tp_size": 1}]}],
}


def write_recording(folder: Path, **meta: Any) -> None:
    """Write a recording whose measured times are those of the simulation."""
    write_kernels(folder)
    (folder / "meta.json").write_text(json.dumps({key: value for key, value in (META | meta).items() if value}))
    (folder / "config.json").write_text(json.dumps(MACHINE))
    workload = [
        {"timestamp": 3.0 * index, "input_length": 40 + index, "output_length": 20, "hash_ids": [index // 2, index, -1]}
        for index in range(12)
    ]
    (folder / "workload.jsonl").write_text("\n".join(map(json.dumps, workload)))
    measured = {"queued_ts": 0.0, "first_token_ts": 1.0, "last_token_ts": 2.0, "input_toks": 1, "output_toks": 2}
    (folder / "requests.jsonl").write_text(json.dumps(measured))
    rows = [
        {"queued_ts": each.arrival, "first_token_ts": each.first_token, "last_token_ts": each.end}
        | {"input_toks": each.n_in, "output_toks": each.n_out}
        for each in ServedRecording.load(folder).simulated("vllm").records
    ]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_a_recording_is_compared_with_both_policies(tmp_path: Path) -> None:
    write_recording(tmp_path)
    result = run("--recording", str(tmp_path), "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert {row["error"] for row in rows.values()} == {0.0}
    assert rows["TTFT mean, ms"]["chairlift"] != rows["TTFT mean, ms"]["vllm"]
    loaded = ServedRecording.load(tmp_path)
    assert (loaded.settings.num_blocks, loaded.settings.slots, loaded.settings.max_batch_tokens) == (30, 8, 64)
    assert loaded.entries[0].block_tokens == 16
    assert latencies(loaded.measured)["whole run, s"] == rows["whole run, s"]["measured"]


def test_blocks_that_a_recording_does_not_name_are_those_that_fit(tmp_path: Path) -> None:
    """The real recording on this card has 2,588 blocks."""
    write_recording(tmp_path, kv_cache=None, scheduler_config=None)
    blocks = ServedRecording.load(tmp_path).settings.num_blocks
    assert 2500 < blocks < 3000


def test_several_devices_exchange_their_results(tmp_path: Path) -> None:
    write_recording(tmp_path)
    alone = ServedRecording.load(tmp_path).cost
    machine = json.loads((tmp_path / "config.json").read_text())
    machine["nodes"][0]["instances"][0]["tp_size"] = 2
    (tmp_path / "config.json").write_text(json.dumps(machine))
    shared = ServedRecording.load(tmp_path).cost
    shape = StepShape(decode_tokens=4, decode_kv=64, requests=4)
    per_sum = 2 * 1000e-9 + 4 * 4096 * 2 / (16 * 2**30)
    assert shared.predict(shape) - alone.predict(shape) == pytest.approx((2 * LAYERS + 1) * per_sum)


def change(folder: Path, file: str, **values: Any) -> None:
    """Replace parts of a file; None removes them."""
    content = json.loads((folder / file).read_text()) | values
    (folder / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def change_instance(folder: Path, count: int = 1, **values: Any) -> None:
    machine = json.loads((folder / "config.json").read_text())
    node = machine["nodes"][0]
    node["instances"] = [node["instances"][0] | values] * count
    (folder / "config.json").write_text(json.dumps(machine))


def test_a_recording_without_measured_times_is_predicted(tmp_path: Path) -> None:
    write_recording(tmp_path)
    (tmp_path / "requests.jsonl").unlink()
    result = run("--recording", str(tmp_path), "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert {row["measured"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]} == {None}


def test_a_request_that_was_not_answered_is_left_out(tmp_path: Path) -> None:
    write_recording(tmp_path)
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    failed = json.dumps(json.loads(lines[0]) | {"last_token_ts": None})
    (tmp_path / "requests.jsonl").write_text("\n".join([failed, *lines[1:]]))
    assert len(ServedRecording.load(tmp_path).measured) == len(lines) - 1


def test_settings_are_found_wherever_a_version_writes_them(tmp_path: Path) -> None:
    write_recording(tmp_path)
    change(tmp_path, "meta.json", scheduler_config=None, engine_kwargs=None, model=None)
    change(tmp_path, "meta.json", kv_cache={"num_kv_tokens": 640, "block_size": 32})
    change_instance(tmp_path, max_num_seqs=5, max_num_batched_tokens=48, model_name="Qwen/Qwen3-32B")
    loaded = ServedRecording.load(tmp_path)
    assert (loaded.settings.slots, loaded.settings.max_batch_tokens) == (5, 48)
    assert (loaded.settings.num_blocks, loaded.settings.block_size) == (19, 32)
    assert loaded.cost.num_layers == 64


def test_the_share_of_weights_and_blocks_gives_the_blocks_of_the_real_recording(tmp_path: Path) -> None:
    write_recording(tmp_path)
    change(tmp_path, "meta.json", kv_cache=None)
    change_instance(tmp_path, npu_mem={"mem_size": 24, "mem_util": 0.833919})
    assert ServedRecording.load(tmp_path).settings.num_blocks == 2588 - 1


def test_newer_tables_of_attention_say_the_same(tmp_path: Path, cost: KernelTimes) -> None:
    rows = list(csv.DictReader((tmp_path / "attention.csv").open(newline="")))
    newer = [
        {"layer": "attention", "prefill_chunk": row["prefill_chunk"], "decode_q_len": 1}
        | {"prefill_key": int(row["kv_prefill"]) + int(row["prefill_chunk"]) / 2}
        | {name: row[name] for name in ("n_decode", "kv_decode", "time_us")}
        for row in rows
    ]
    drafted = [row | {"decode_q_len": 4, "time_us": 1e9} for row in newer]
    write_rows(tmp_path / "attention.csv", newer + drafted)
    again = KernelTimes.load(tmp_path, LAYERS)
    for shape in (StepShape(4, 16, 100, 300, 5), StepShape(9, 0, 900, 0, 9), StepShape(0, 40, 0, 3000, 1)):
        assert again.predict(shape) == cost.predict(shape)


def test_what_is_larger_than_the_grid_goes_on_as_before(cost: KernelTimes) -> None:
    """A server with larger steps, more slots or longer contexts than were measured is predicted, not capped."""
    chunk, context, decodes, kv = 128, 512, 32, 500
    shape = StepShape(decodes, chunk, decodes * kv, chunk_kv(context, chunk), decodes + 1)
    expected = by_hand(chunk + decodes, decodes + 1, attention(chunk, context, decodes, kv))
    assert cost.predict(shape) == pytest.approx(expected)


def test_a_grid_with_gaps_takes_what_was_measured_closest() -> None:
    grid = Grid({(1, 1): 1.0, (2, 1): 2.0, (2, 2): 4.0, (8, 8): 64.0})
    assert grid.at(1.5, 1) == 1.5
    assert grid.at(1.5, 1.5) == pytest.approx((0.25 * 1 + 0.25 * 2 + 0.25 * 4) / 0.75)
    assert grid.at(7, 100) == 64.0


def write_mixture(folder: Path) -> None:
    """The recording of a mixture."""
    rows = [
        {"ep": ep, "tokens": tokens, "activated_experts": experts, "time_us": 10 * ep + experts + tokens}
        for ep, tokens, experts in product((1, 2), (1, 64, 256), (1, 32, 64))
    ]
    write_rows(folder / "moe.csv", rows)
    write_recording(folder, model="Qwen/Qwen3-30B-A3B-Instruct-2507")


def test_engines_that_share_experts_compute_each_step_together(tmp_path: Path) -> None:
    write_mixture(tmp_path)
    change_instance(tmp_path, 2, dp_group="A", ep_size=2)
    loaded = ServedRecording.load(tmp_path)
    assert (loaded.together, loaded.replicas) == (True, 2)
    small, large = StepShape(2, 0, 64, 0, 2), StepShape(4, 64, 300, 2080, 5)
    both, alone = loaded.cost.predict_together([small, large]), loaded.cost.predict_together([large])
    assert both > alone > 0
    outcome = loaded.simulated("vllm")
    assert sorted(record.n_in for record in outcome.records) == sorted(entry.n_in for entry in loaded.entries)
    assert {record.replica for record in outcome.records} == {0, 1}
    assert all(record.arrival < record.first_token <= record.end for record in outcome.records)


def test_one_engine_alone_is_the_same_step_by_step(tmp_path: Path) -> None:
    write_recording(tmp_path)
    loaded = ServedRecording.load(tmp_path)
    scheduler = loaded.settings.make(loaded.cost).scheduler
    again = simulate_together(trace_arrivals(list(loaded.entries)), [scheduler], loaded.cost.predict_together)
    ours = loaded.simulated("chairlift")
    times = [[(each.first_token, each.end) for each in outcome.records] for outcome in (again, ours)]
    assert [pytest.approx(each) for each in times[0]] == times[1]
    check_quiescent(scheduler)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("meta.json", None, "recording: "),
        ("meta.json", "[1]", "recording: cannot read"),
        ("meta.json", json.dumps(META | {"model": "example/unknown-7b"}), "model: the recording is one of"),
        ("meta.json", json.dumps(META | {"scheduler_config": {"policy": "priority"}}), "only vLLM's policy fcfs"),
        ("config.json", '{"nodes": []}', "recording: cannot read"),
        ("requests.jsonl", '{"queued_ts": 1}', "recording: line 1"),
        ("requests.jsonl", "", "has no requests"),
        ("workload.jsonl", '{"timestamp": 1}', "has no 'input_length'"),
        ("meta.json", json.dumps(META | {"scheduler_config": {"long_prefill_token_threshold": 4}}), "is simulated"),
        ("attention.csv", "prefill_chunk,time_us\n1,2\n", "recording: cannot read"),
        ("dense.csv", "layer,tokens,time_us\na,b,c\n", "recording: cannot read"),
    ],
)
def test_bad_recordings_are_one_line(file: str, content: str | None, problem: str, tmp_path: Path) -> None:
    write_recording(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    result = run("--recording", str(tmp_path))
    assert result.exit_code == 2
    assert problem in result.output
    assert "Traceback" not in result.output


def test_the_policy_of_vllm_has_no_other_order() -> None:
    assert "scheduler: vllm has only" in run("--scheduler", "vllm", "--order", "shortest", "--requests", "5").output
    assert "scheduler: there is no 'sglang'" in run("--scheduler", "sglang", "--requests", "5").output
