"""Planning of KV memory, and the free memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.recurrent import RecurrentLayer, StateSpec
from chairlift.engine import memory_plan
from chairlift.engine.memory_plan import MemoryPlan, bytes_per_token, plan_memory
from chairlift.errors import InvalidParameter
from chairlift.machine import hardware
from chairlift.options import parse_bytes
from chairlift.runner import memory
from chairlift.runner.memory import allocate_storage

CPU = torch.device("cpu")
SMOLLM2_LAYERS = [AttentionLayer(i, num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125) for i in range(30)]


def plan(
    kv_memory: int | str | None,
    max_batch_requests: int = 64,
    memory_share: float | None = None,
    step_bytes: int = 0,
    layers: Sequence[AttentionLayer] = SMOLLM2_LAYERS,
    weight_bytes: int = 651_264_000,
    dtype: torch.dtype = torch.float32,
    **states: Any,
) -> MemoryPlan:
    return plan_memory(
        layers,
        weight_bytes=weight_bytes,
        kv_memory=kv_memory,
        memory_share=memory_share,
        dtype=dtype,
        device=CPU,
        block_size=16,
        max_model_len=2048,
        max_batch_requests=max_batch_requests,
        step_bytes=step_bytes,
        **states,
    )


def test_the_log_shows_the_arithmetic_as_documented() -> None:
    lines = plan("2GiB", weight_bytes=192_099_600, dtype=torch.bfloat16).lines()
    documented = (Path(__file__).parents[2] / "docs" / "kv-cache.md").read_text()
    assert "23,040 bytes per token x 16 tokens per block" in lines[2]
    for line in lines:
        assert line in documented


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("latent", [None, 48])
def test_the_planned_bytes_are_those_of_the_tensors(kind: torch.dtype, latent: int | None) -> None:
    """8-bit integers have scales, too."""
    layers = [AttentionLayer(i, num_heads=4, num_kv_heads=2, head_dim=64, scale=1.0, latent_dim=latent) for i in (0, 1)]
    storage = allocate_storage(layers, 3, 16, kind, CPU)
    assert sum(tensor.nbytes for tensor in storage.tensors) == (3 + 1) * 16 * bytes_per_token(layers, kind)


def test_the_cache_gets_a_share_of_free_memory_limited_to_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = 46_080 * 16
    monkeypatch.setattr(memory_plan, "free_memory", lambda device, **_: 4 * 1000 * per_block)
    assert plan(None).num_blocks == 1000
    assert plan(None, memory_share=0.5).num_blocks == 2000
    assert plan(None, max_batch_requests=2).num_blocks == 2 * 2048 // 16
    assert plan(5 * per_block + 1).num_blocks == 5
    with pytest.raises(InvalidParameter, match="kv_memory"):
        plan(per_block - 1)


def test_the_largest_step_gets_its_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = 46_080 * 16
    monkeypatch.setattr(memory_plan, "free_memory", lambda device, **_: 4000 * per_block)
    beside = plan(None, step_bytes=400 * per_block)
    assert beside.num_blocks == 900
    assert "25% of free memory beside 281.2 MiB for the largest step" in beside.source
    assert plan(3600 * per_block, step_bytes=400 * per_block).num_blocks == 3600
    with pytest.raises(InvalidParameter, match=r"kv_memory: .* more than .* beside 281.2 MiB for the largest step"):
        plan(3601 * per_block, step_bytes=400 * per_block)
    with pytest.raises(InvalidParameter, match="is too little"):
        plan(None, step_bytes=5000 * per_block)


@pytest.mark.parametrize(
    ("text", "count"), [(7, 7), ("7", 7), ("2k", 2000), ("1.5 GiB", 3 * 2**29), ("512MB", 512_000_000), ("1Ti", 2**40)]
)
def test_sizes_in_bytes_are_parsed(text: int | str, count: int) -> None:
    assert parse_bytes("kv_memory", text) == count


@pytest.mark.parametrize("text", ["", "some", "-1", 0, "1XB", "1 2", True])
def test_invalid_sizes_are_refused(text: int | str) -> None:
    with pytest.raises(InvalidParameter, match="kv_memory"):
        parse_bytes("kv_memory", text)


def test_a_container_limit_counts_but_reclaimable_file_pages_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "MOUNT", tmp_path)
    monkeypatch.setattr(memory, "_available_to_machine", lambda: 1000)
    assert memory.free_memory(CPU) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory(CPU) == 1000
    (tmp_path / "memory.max").write_text("800\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert memory.free_memory(CPU) == 100
    (tmp_path / "memory.stat").write_text("anon 200\nfile 500\ninactive_file 400\nactive_file 100\n")
    assert memory.free_memory(CPU) == 500


def test_the_batch_size_is_limited_to_the_short_sequences_that_fit() -> None:
    whole = plan("2GiB")
    assert whole.max_requests(64) == 64
    small = plan(whole.bytes_per_token * whole.block_size * 20)
    assert small.num_tokens == 320
    assert small.max_requests(64) == 5
    assert plan(whole.bytes_per_token * whole.block_size).max_requests(64) == 1


MIB = 2**20
RECURRENT = [
    RecurrentLayer(i, (StateSpec("recurrent", (32, 128, 128), torch.float32),)) for i in range(3)
]  # 2 MiB each


def test_states_and_blocks_share_the_memory() -> None:
    """A state of 6 MiB: as many as there is a use for, up to half of the memory, or what the KV cache leaves."""
    found = plan("600MiB", max_batch_requests=10, recurrent=RECURRENT, states_per_request=4)
    assert (found.bytes_per_state, found.num_states) == (6 * MIB, 41)
    assert found.num_blocks == (600 - 41 * 6) * MIB // (46_080 * 16)
    assert plan("600MiB", max_batch_requests=64, recurrent=RECURRENT, states_per_request=4).num_states == 50
    little_kv = plan("600MiB", max_batch_requests=1, recurrent=RECURRENT, states_per_request=90)
    assert little_kv.num_states == (600 * MIB - 128 * 46_080 * 16) // (6 * MIB)
    given = plan("600MiB", recurrent=RECURRENT, state_memory="60MiB")
    assert given.num_states == 10
    assert given.max_requests(64) == 9
    assert given.snapshot_interval == 6 * MIB // 46_080
    assert (
        "           6.0 MiB per sequence x 10 slots for running requests, draft tokens and snapshots" in given.lines()
    )


def test_the_log_shows_states_as_documented() -> None:
    attention = [AttentionLayer(i, num_heads=16, num_kv_heads=2, head_dim=256, scale=1.0) for i in range(12)]
    specs = StateSpec("conv", (8192, 3), torch.float32), StateSpec("recurrent", (32, 128, 128), torch.float32)
    found = plan_memory(
        attention,
        weight_bytes=0,
        kv_memory="2GiB",
        dtype=torch.bfloat16,
        device=CPU,
        block_size=16,
        max_model_len=32768,
        max_batch_requests=64,
        recurrent=[RecurrentLayer(i, specs) for i in range(36)],
        states_per_request=4,
    )
    documented = (Path(__file__).parents[2] / "docs" / "state.md").read_text()
    for line in found.lines()[1:]:
        assert line in documented


def test_a_model_without_attention_has_blocks_without_bytes() -> None:
    found = plan("600MiB", max_batch_requests=10, layers=(), recurrent=RECURRENT, states_per_request=4)
    assert (found.num_states, found.kv_bytes, found.num_blocks) == (41, 0, 10 * 2048 // 16)


def test_too_little_memory_for_states_is_refused() -> None:
    for options, problem in (
        ({"kv_memory": "20MiB"}, "kv_memory: 20.0 MiB is too little: 2 states of 6.0 MiB"),
        ({"kv_memory": "600MiB", "state_memory": "11MiB"}, "state_memory: 11.0 MiB is too little: 2 states"),
        ({"kv_memory": "60MiB", "state_memory": "60MiB"}, "state_memory: 60.0 MiB leaves no block"),
    ):
        with pytest.raises(InvalidParameter, match=problem):
            plan(recurrent=RECURRENT, **options)  # type: ignore[arg-type]
