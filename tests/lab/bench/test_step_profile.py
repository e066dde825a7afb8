"""`chairlift profile`: counts, timelines from a trace, and a run on a tiny model."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from chairlift.attention.interface import AttentionLayer
from chairlift.cli.main import app
from chairlift.config import EngineConfig
from chairlift.engine.startup import load_engine
from chairlift.errors import InvalidParameter
from chairlift.kernels.cpu.decoder import _add_product, attend_layer, decode_layer, decode_step, store_layer
from chairlift.layers.linear import Linear
from chairlift_lab.common.floor import ATTENTION, GEMM, SAMPLING, attention_work, linear_work
from chairlift_lab.profile.cpu import LAST_PIECE, layer_pieces
from chairlift_lab.profile.gpu import (
    FIRST_KERNEL,
    HOST_GAP,
    LAUNCH,
    OTHER,
    RECURRENCE,
    device_activities,
    kind_of,
    launch_seconds,
    read_timeline,
)
from chairlift_lab.profile.step_profile import Batch, ProfileSettings
from tests.kernels.tiny_config import CONFIG


def test_products_count_every_weight_once_and_every_row() -> None:
    linear = Linear(torch.zeros(5, 3, dtype=torch.bfloat16))
    work = linear_work(linear, rows=4)
    assert (work.flops, work.bytes) == (2 * 4 * 3 * 5, 3 * 5 * 2)
    assert linear_work(linear, rows=0).bytes == 0


def test_attention_counts_the_context_of_each_token() -> None:
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
    work = attention_work(layer, [(10, 1), (2, 3)], kv_itemsize=2)
    seen = 11 + (3 + 4 + 5)
    assert work.flops == 4 * seen * 4 * 8
    assert work.bytes == 2 * (11 + 5) * 2 * 8 * 2
    narrow = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, window=4)
    chunked = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, chunk=4)
    # Positions 6 and 7 see 3 and 4 of their chunk, position 8 only itself.
    assert attention_work(chunked, [(6, 3)], 4).bytes == 5 * chunked.numbers_per_token * 4
    assert attention_work(chunked, [(6, 3)], 4).flops == 2.0 * (3 + 4 + 1) * 4 * (8 + 8)
    assert attention_work(narrow, [(10, 1), (2, 3)], kv_itemsize=2).flops == 4 * (4 + 3 + 4 + 4) * 4 * 8


def slices(*events: tuple[str, str, float, float]) -> list[dict[str, Any]]:
    return [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in events]


def one_step(at: float) -> list[dict[str, Any]]:
    """100 µs: 4 of copy, 1 of waiting, 5 to begin, 50 of product, of which 10 overlap with 30 of attention, 3 of
    waiting, 7 of sampling, and 10 of waiting for the next step."""
    return slices(
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at, 4),
        ("kernel", FIRST_KERNEL, at + 5, 5),
        ("kernel", "nvjet_tst_64x8", at + 10, 50),
        ("kernel", "decode_kernel", at + 50, 30),
        ("kernel", "_sample_kernel", at + 83, 7),
        ("cuda_runtime", "cudaGraphLaunch", at, 6),
        ("cuda_runtime", "cudaEventSynchronize", at, 60),
    )


def test_the_parts_of_a_timeline_add_up_to_its_steps() -> None:
    events = [event for number in range(6) for event in one_step(1000 + 100 * number)]
    timeline = read_timeline(device_activities(events), skip_steps=2, steps=3)
    assert timeline.steps == 3
    assert timeline.seconds == pytest.approx(300e-6)
    per_step = {name: 1e6 * seconds / 3 for name, seconds in timeline.parts.items()}
    expected = {GEMM: 50, ATTENTION: 20, RECURRENCE: 0, SAMPLING: 7, OTHER: 4 + 5, LAUNCH: 1 + 3, HOST_GAP: 10}
    assert per_step == pytest.approx(expected)
    assert timeline.idle_share == pytest.approx(0.14)
    assert timeline.num_kernels == 12
    assert launch_seconds(events) == pytest.approx(36e-6)


def test_without_captured_steps_all_waiting_counts_as_host_gap() -> None:
    events = slices(("kernel", "gemm", 0, 10), ("kernel", "elementwise", 15, 5), ("kernel", "gemm", 30, 10))
    timeline = read_timeline(device_activities(events), skip_steps=3, steps=1)
    assert timeline.parts[HOST_GAP] == pytest.approx(15e-6)
    assert timeline.parts[LAUNCH] == 0
    assert timeline.seconds == pytest.approx(40e-6)
    with pytest.raises(RuntimeError, match="too few"):
        read_timeline([], skip_steps=0, steps=1)


def test_kernels_are_grouped_by_name() -> None:
    names = {
        GEMM: [
            "product_kernel",
            "vector_kernel",
            "_linear_kernel",
            "_grouped_kernel",
            "nvjet_tst_128x64_64x7",
            "sm90_xmma_gemm_bf16",
            "cublasLt::splitKreduce_kernel",
        ],
        ATTENTION: ["decode_kernel", "_prefill_kernel", "flash_fwd_splitkv_kernel", "_absorbed_kernel", "_join_kernel"],
        RECURRENCE: ["_recurrence_kernel", "_scan_kernel", "_convolve_kernel", "_step_kernel"],
        SAMPLING: ["_sample_kernel"],
        OTHER: ["_add_norm_kernel", "_sort_kernel", "_rotate_and_store_kernel", "_gated_mul_kernel", FIRST_KERNEL],
    }
    assert {kind: [name for name in each if kind_of(name) == kind] for kind, each in names.items()} == names


def named_norms(size: int) -> Any:
    """As much of a network as decides its phases; with size 0 it has no norms behind its blocks."""
    norms = SimpleNamespace(weight=np.ones((1, size)))
    return SimpleNamespace(after_attention=norms, after_mlp=norms, parallel=False)


def test_every_phase_of_the_kernel_has_a_name() -> None:
    """The profile names one phase per barrier of the kernel, except the one only a draft head uses."""
    kernels = (store_layer, decode_layer, decode_step, _add_product, attend_layer)
    barriers = "".join(inspect.getsource(kernel.py_func) for kernel in kernels).count(" barrier(")
    # The norm before the MLP has two places; `_add_product` is called twice and ends at one or two barriers.
    assert barriers - 1 - 3 + 2 * 2 == len([*layer_pieces(named_norms(8)), LAST_PIECE]) + 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.slow)])  # compiles for 10 s
def test_a_tiny_model_from_the_command_line(tmp_path: Path, quantization: str) -> None:
    config, result, trace = (tmp_path / name for name in ("config.json", "result.json", "trace.json"))
    config.write_text(json.dumps(CONFIG))
    command = f"profile --model-config {config} --device cpu --batch 1,3 --prompt-tokens 9 --steps 4 --kv-memory 4MiB"
    command += f" --quantization {quantization} --json {result} --out {trace}"
    outcome = CliRunner().invoke(app, command.split())
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(result.read_text())
    assert report["settings"]["quantization"] == quantization
    assert [row["batch"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert sum(part["seconds"] for part in row["parts"]) == pytest.approx(row["step_seconds"])
        assert all(part["seconds"] > 0 for part in row["parts"])
        gemm = row["parts"][0]
        products = [seconds for name, seconds in row["pieces"].items() if name.startswith("product")]
        assert len(products) == 5  # the head, and four in a layer
        assert gemm["seconds"] == pytest.approx(sum(products))
        assert gemm["flops"] == 2 * row["batch"] * number_of_weights()
        if quantization == "int8":
            assert set(row["pieces"]) == {*layer_pieces(named_norms(0)), LAST_PIECE, "product head"}
    check_nesting(json.loads(trace.read_text())["traceEvents"], num_steps=8)


def test_slots_are_added_only_if_the_default_has_too_few() -> None:
    settings = ProfileSettings([1, 8])
    for config in (EngineConfig(device="cpu"), EngineConfig(device="cpu", max_batch_tokens=32)):
        assert settings.with_slots(config) is config
    assert ProfileSettings([1, 100]).with_slots(EngineConfig(device="cpu")).max_batch_requests == 100
    chosen = EngineConfig(device="cpu", max_batch_requests=4)
    assert settings.with_slots(chosen) is chosen  # and refused later, by its name


@pytest.mark.usefixtures("one_thread")
def test_a_request_that_reaches_the_context_limit_too_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(device="cpu", load_format="dummy", kv_memory="4MiB", max_model_len=32, max_prefill_tokens=4)
    batch = Batch(load_engine(str(tmp_path), config).engine, 4, 24, Random(0))
    with pytest.raises(InvalidParameter, match=r"prompt_tokens.*full before all 4"):
        batch.start()


def number_of_weights() -> int:
    """The weights of all products of the tiny model's one layer, and of its head."""
    qkv, output = 32 * (4 + 2 * 2) * 16, 4 * 16 * 32
    return qkv + output + 3 * 32 * 48 + 32 * 300


def check_nesting(events: list[dict[str, Any]], num_steps: int) -> None:
    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in spans if event["name"].startswith("step")]
    assert len(steps) == num_steps
    for span in spans:
        inside = [step for step in steps if step["ts"] <= span["ts"] and ends(span) <= ends(step) + 1]
        assert len(inside) == 1


def ends(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def test_a_batch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for more, problem in (
        ("--batch 0", "--batch"),
        ("--batch 2,x", "--batch"),
        ("--steps 0", "--steps"),
        ("--prompt-tokens 1000", "--prompt-tokens"),
        ("--batch 9 --max-batch-requests 8", "--batch"),
        ("--model smollm2-135m", "--model-config"),
        ("--load-format auto", "--load-format"),
        ("--batch 9 --max-batch-tokens 8", "--batch"),
        ("--speculate ngram", "--speculate"),
        ("--draft-length 2", "--draft-length"),
        # Fits, but for the tokens that the first request generates while the others' prompts are computed.
        ("--batch 8 --prompt-tokens 70 --steps 8 --max-prefill-tokens 10", "--prompt-tokens"),
    ):
        command = f"profile --model-config {tmp_path} --device cpu --kv-memory 4MiB {more}"
        outcome = CliRunner().invoke(app, command.split())
        assert outcome.exit_code == 2, more
        assert problem in outcome.output, outcome.output
    with pytest.raises(InvalidParameter, match="batch"):
        ProfileSettings([])
