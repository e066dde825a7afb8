"""Prometheus metrics."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import msgspec

from chairlift.core.events import completion_ids
from chairlift.core.kv.state_slots import StateUsage
from chairlift.core.kv.tiers import TierUsage
from chairlift.server.metrics import Metrics
from chairlift.server.wire.messages import Cancel, StepReport, Submit, ToEngine, Update
from tests.server.front_end import NAME as SCRIPTED
from tests.server.front_end import ScriptedEngine, front_end, stay_silent
from tests.server.running_server import HTTP, NAME, RunningServer, start_server, wait_for


def test_a_restart_is_counted_and_resets_the_gauges() -> None:
    metrics = Metrics()
    metrics.record_step(
        StepReport(updates=[], running=3, waiting=4, used_blocks=7, total_blocks=9, preemptions=0, requests=3)
    )
    assert b"chairlift_requests_running 3.0" in metrics.render()
    assert b"chairlift_kv_blocks_used 7.0" in metrics.render()
    metrics.record_restart()
    shown = metrics.render().decode().splitlines()
    for line in ("kv_blocks_used 0.0", "requests_running 0.0", "requests_waiting 0.0", "engine_restarts_total 1.0"):
        assert f"chairlift_{line}" in shown


def test_prediction_errors_and_the_budget_are_recorded() -> None:
    metrics = Metrics()
    empty = StepReport(updates=[], running=0, waiting=0, used_blocks=1, total_blocks=9, preemptions=0)
    metrics.record_step(msgspec.structs.replace(empty, requests=3, seconds=0.2))  # without a prediction
    metrics.record_step(msgspec.structs.replace(empty, requests=3, seconds=0.2, predicted_seconds=0.15))
    metrics.record_step(msgspec.structs.replace(empty, prefill_limit=48, limit_reason="tpot"))
    shown = metrics.render().decode().splitlines()
    assert "chairlift_step_prediction_error_ratio_count 1.0" in shown
    assert 'chairlift_step_prediction_error_ratio_bucket{le="0.2"} 0.0' in shown
    assert 'chairlift_step_prediction_error_ratio_bucket{le="0.3"} 1.0' in shown
    assert "chairlift_step_prefill_limit_tokens 48.0" in shown
    assert 'chairlift_budget_decisions_total{reason="tpot"} 1.0' in shown


def test_the_docs_list_exactly_the_existing_metrics() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(chairlift_(?!fleet_)\w+)`", page, flags=re.MULTILINE))
    kinds = re.findall(r"^# TYPE (chairlift_\w+) (\w+)", Metrics().render().decode(), flags=re.MULTILINE)
    assert documented == {name for name, _ in kinds if not name.endswith("_created")}


def test_the_docs_list_exactly_the_aliases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(vllm:\w+)`", page, flags=re.MULTILINE))
    kinds = re.findall(r"^# TYPE (vllm:\w+) (\w+)", Metrics("m").render().decode(), flags=re.MULTILINE)
    assert documented == {name for name, _ in kinds}
    assert b"vllm:" not in Metrics().render()


def test_metrics_have_vllms_names_too() -> None:
    metrics = Metrics("some-model")
    report = StepReport(updates=[], running=3, waiting=4, used_blocks=2, total_blocks=8, preemptions=1, requests=3)
    metrics.record_step(msgspec.structs.replace(report, verifications=2, proposed_at=[2, 1], accepted_at=[1, 0]))
    metrics.prompt_tokens.inc(100)
    metrics.cached_tokens.inc(60)
    metrics.output_tokens.inc(7)
    metrics.first_token.observe(0.02)
    for reason in ("stop", "stop", "cancelled", "error"):
        metrics.requests.labels(reason).inc()
    shown = metrics.render().decode().splitlines()
    for name, value in {
        "num_requests_running": 3.0,
        "num_requests_waiting": 4.0,
        "kv_cache_usage_perc": 0.25,
        "gpu_cache_usage_perc": 0.25,
        "num_preemptions_total": 1.0,
        "prompt_tokens_total": 100.0,
        "prefix_cache_queries_total": 100.0,
        "prefix_cache_hits_total": 60.0,
        "generation_tokens_total": 7.0,
        "time_to_first_token_seconds_count": 1.0,
        "spec_decode_num_drafts_total": 2.0,
        "spec_decode_num_draft_tokens_total": 3.0,
        "spec_decode_num_accepted_tokens_total": 1.0,
    }.items():
        assert f'vllm:{name}{{engine="0",model_name="some-model"}} {value}' in shown
    finished = [line for line in shown if line.startswith("vllm:request_success_total{")]
    assert finished == [
        f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="some-model"}} {count}'
        for reason, count in (("stop", 2.0), ("abort", 1.0))
    ]


def test_state_slots_are_counted_and_reset() -> None:
    metrics = Metrics()
    report = StepReport(updates=[], running=1, waiting=0, used_blocks=1, total_blocks=9, preemptions=0)
    metrics.record_step(msgspec.structs.replace(report, states=StateUsage(used=3, snapshots=2, total=8)))
    assert metrics.values().items() >= {"state_slots_used": 3, "state_snapshots": 2, "state_slots_total": 8}.items()
    metrics.record_restart()
    assert metrics.values()["state_slots_total"] == 8
    assert not metrics.values().keys() & {"state_slots_used", "state_snapshots"}


def test_wait_reasons_are_set_and_reset() -> None:
    metrics = Metrics()
    empty = StepReport(updates=[], running=0, waiting=0, used_blocks=1, total_blocks=9, preemptions=0)
    metrics.record_step(
        msgspec.structs.replace(empty, waiting=5, wait_reasons={"slots": 3, "isolation": 1, "prefix": 2})
    )
    shown = metrics.render().decode().splitlines()
    for line in (
        '{reason="slots"} 3.0',
        '{reason="seats"} 3.0',
        '{reason="courtesy"} 1.0',
        '{reason="prefix"} 2.0',
        '{reason="memory"} 0.0',
    ):
        assert f"chairlift_requests_waiting_for{line}" in shown
    metrics.record_step(msgspec.structs.replace(empty, waiting=1, wait_reasons={"memory": 1}))
    shown = metrics.render().decode().splitlines()
    for line in ('{reason="slots"} 0.0', '{reason="seats"} 0.0', '{reason="memory"} 1.0'):
        assert f"chairlift_requests_waiting_for{line}" in shown
    metrics.record_restart()
    assert b'chairlift_requests_waiting_for{reason="memory"} 0.0' in metrics.render()


def test_gauges_are_right_before_the_first_step_and_when_idle(tiny_folder: Path, tmp_path: Path) -> None:
    server = start_server(tiny_folder, tmp_path / "log")
    try:
        assert server.metric("chairlift_kv_blocks_total") > 0
        assert server.metric("chairlift_steps_total") == server.metric("chairlift_requests_open") == 0
        total = server.metric("chairlift_kv_blocks_total")
        body = {"model": NAME, "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200
        server.wait_idle()
        assert server.metric("chairlift_steps_total") > 0
        assert server.metric("chairlift_requests_running") == server.metric("chairlift_requests_open") == 0
        assert server.metric("chairlift_kv_blocks_total") == total
    finally:
        server.stop()


def test_the_dashboard_and_the_metrics_have_the_same_number_of_open_requests() -> None:
    with front_end(stay_silent) as front:
        request_body = {"model": SCRIPTED, "prompt": "hello", "n": 3}
        asking = threading.Thread(
            target=lambda: HTTP.post(front.url + "/v1/completions", json=request_body), daemon=True
        )
        asking.start()
        wait_for(lambda: front.engine.num_open == 3, "the request to reach the engine")
        shown = json.loads(front.service.subscribers._service_frame())
        assert shown["open"] == shown["metrics"]["requests_open"] == front.metric("requests_open") == 3
        (submitted,) = front.engine.received
        assert isinstance(submitted, Submit)
        for one_id in completion_ids(submitted.request_id, 3):
            front.engine.publish(Update(one_id, finish_reason="stop"))
        asking.join(30)
        assert front.metric("requests_open") == 0
        assert front.metric("engine_up") == 1


def test_the_numbers_of_a_real_engine_add_up(server: RunningServer) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    server.wait_idle()
    before = read()
    prompt = f"the numbers of {time.time_ns()} must add up, for this prompt and for the one after it"
    body = {"model": NAME, "prompt": prompt, "max_tokens": 9, "ignore_eos": True}
    usage = [server.post("/v1/completions", body | {"n": n}).json()["usage"] for n in (1, 2)]
    server.wait_idle()
    after = read()

    def grown(name: str) -> float:
        return after[f"chairlift_{name}"] - before.get(f"chairlift_{name}", 0.0)

    prompts, cached = (sum(one["prompt_tokens"] for one in usage), usage[1]["prompt_tokens_details"]["cached_tokens"])
    assert cached > 0
    assert grown("prompt_tokens_total") == prompts
    assert grown("prompt_tokens_cached_total") == cached
    assert grown("output_tokens_total") == 27
    assert grown('requests_total{reason="length"}') == 3
    assert grown('prefix_lookups_total{result="never_seen"}') >= 1
    assert grown('prefix_lookups_total{result="all_found"}') >= 1
    # The first token of each completion comes with the prefill; the second of two completions computes one more token.
    assert grown('step_tokens_total{kind="decode"}') == 3 * 8
    assert grown('step_tokens_total{kind="prefill"}') == prompts - cached + 1
    assert grown("steps_total") == grown("step_requests_count")
    assert 18 <= grown("steps_total") <= 22
    assert grown("step_requests_sum") >= 27
    assert grown("time_to_first_token_seconds_count") == grown("end_to_end_seconds_count") == 3
    assert grown("inter_token_seconds_count") == 3 * 8
    for phase in ("queue", "prefill", "decode"):
        assert grown(f"request_{phase}_seconds_count") == 3
    phases = sum(grown(f"request_{phase}_seconds_sum") for phase in ("queue", "prefill", "decode"))
    assert 0 < phases <= grown("end_to_end_seconds_sum") + 1e-6
    assert (grown("request_prompt_tokens_count"), grown("request_prompt_tokens_sum")) == (2, prompts)
    assert (grown("request_output_tokens_count"), grown("request_output_tokens_sum")) == (3, 27)
    for part in ("schedule", "build", "forward", "sample", "apply"):
        assert grown(f'step_part_seconds_total{{part="{part}"}}') > 0
    assert after["chairlift_requests_open"] == after["chairlift_requests_waiting"] == 0


def test_latency_does_not_depend_on_when_the_client_reads() -> None:
    with front_end() as front:
        request_body = {"model": SCRIPTED, "prompt": "hello", "stream": True}
        with HTTP.stream("POST", front.url + "/v1/completions", json=request_body) as answer:
            wait_for(lambda: front.metric("end_to_end_seconds_count") == 1, "the engine's answer")
            arrived = front.metric("end_to_end_seconds_sum")
            time.sleep(0.3)
            answer.read()
        assert front.metric("end_to_end_seconds_sum") == arrived
        assert front.metric("time_to_first_token_seconds_count") == 1
        assert front.metric("inter_token_seconds_count") == 1


def never_finish(engine: ScriptedEngine, message: ToEngine) -> None:
    if isinstance(message, Submit):
        engine.publish(Update(message.request_id, text="o", tokens=[5]))
    elif isinstance(message, Cancel):
        engine.publish(Update(message.request_ids[0], text="late", tokens=[6], finish_reason="length"))


def test_completions_of_disconnected_clients_are_counted_once() -> None:
    with front_end(never_finish) as front:
        request_body = {"model": SCRIPTED, "prompt": "hello", "n": 3, "stream": True}
        with HTTP.stream("POST", front.url + "/v1/completions", json=request_body) as answer:
            next(answer.iter_lines())
        wait_for(
            lambda: front.metric("requests_total", reason="cancelled") == 3,
            "the cancelled completions to be counted",
        )
        assert front.metric("requests_total", reason="length") == 0
        assert front.engine.num_open == 0


def test_tiers_are_counted_since_the_start_of_the_engine() -> None:
    metrics = Metrics()
    report = {"updates": [], "running": 0, "waiting": 0, "used_blocks": 0, "total_blocks": 1, "preemptions": 0}
    metrics.record_step(StepReport(**report, tiers=[TierUsage("disk", 5, 10, 100, 7, 1, 2)]))
    metrics.record_step(StepReport(**report, tiers=[TierUsage("disk", 6, 10, 150, 9, 1, 2)]))
    metrics.record_restart()
    metrics.record_step(StepReport(**report, tiers=[TierUsage("disk", 6, 10, 50, 0, 0, 0)]))
    values = metrics.values()
    assert values["kv_tier_used_bytes disk"] == 6
    assert values["kv_tier_loaded_bytes_total disk"] == 200
    assert values["kv_tier_saved_bytes_total disk"] == 9
    assert values["kv_tier_lost_total disk"] == 2
