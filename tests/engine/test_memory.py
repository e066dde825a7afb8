"""Planning of KV memory, and the free memory of a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chairlift.attention.interface import AttentionLayer
from chairlift.byte_sizes import parse_bytes
from chairlift.engine import memory_plan
from chairlift.engine.memory_plan import MemoryPlan, plan_memory
from chairlift.errors import InvalidParameter
from chairlift.runner import device_memory

CPU = torch.device("cpu")
SMOLLM2_LAYERS = [AttentionLayer(i, num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125) for i in range(30)]


def plan(
    kv_memory: int | str | None,
    max_batch_requests: int = 64,
    memory_share: float | None = None,
    step_bytes: int = 0,
) -> MemoryPlan:
    return plan_memory(
        SMOLLM2_LAYERS,
        weight_bytes=651_264_000,
        kv_memory=kv_memory,
        memory_share=memory_share,
        dtype=torch.float32,
        device=CPU,
        block_size=16,
        max_model_len=2048,
        max_batch_requests=max_batch_requests,
        step_bytes=step_bytes,
    )


def test_the_log_shows_the_arithmetic_as_documented() -> None:
    lines = plan("2GiB").lines()
    documented = (Path(__file__).parents[2] / "docs" / "kv-cache.md").read_text()
    assert "46,080 bytes per token x 16 tokens per block" in lines[2]
    for line in lines:
        assert line in documented


def test_the_cache_gets_a_share_of_free_memory_limited_to_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = 46_080 * 16
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: 4 * 1000 * per_block)
    assert plan(None).num_blocks == 1000
    assert plan(None, memory_share=0.5).num_blocks == 2000
    assert plan(None, max_batch_requests=2).num_blocks == 2 * 2048 // 16
    assert plan(5 * per_block + 1).num_blocks == 5
    with pytest.raises(InvalidParameter, match="kv_memory"):
        plan(per_block - 1)


def test_the_largest_step_gets_its_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = 46_080 * 16
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: 4000 * per_block)
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
    monkeypatch.setattr(device_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(device_memory, "_available_to_machine", lambda: 1000)
    assert device_memory.free_memory(CPU) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory.free_memory(CPU) == 1000
    (tmp_path / "memory.max").write_text("800\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert device_memory.free_memory(CPU) == 100
    (tmp_path / "memory.stat").write_text("anon 200\nfile 500\ninactive_file 400\nactive_file 100\n")
    assert device_memory.free_memory(CPU) == 500


def test_the_batch_size_is_limited_to_the_short_sequences_that_fit() -> None:
    whole = plan("2GiB")
    assert whole.max_requests(64) == 64
    small = plan(whole.bytes_per_token * whole.block_size * 20)
    assert small.num_tokens == 320
    assert small.max_requests(64) == 5
    assert plan(whole.bytes_per_token * whole.block_size).max_requests(64) == 1
