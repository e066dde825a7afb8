"""`bench stress`: every kind of event occurs in it, and violations are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from chairlift.attention.storage import KVStorage
from chairlift.cli.main import app
from chairlift.engine.startup import LoadedModel
from chairlift.runner.memory import HostBlocks
from chairlift_lab.bench.stress import StressFailed, stress, stress_config
from chairlift_lab.common.stress_model import greedy_gaps, stress_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return stress_model("llama", torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_every_kind_of_event_occurs(loaded: LoadedModel, preemption: str) -> None:
    config = stress_config(loaded, preemption, speculate="ngram", draft_length=2, seed=0)
    found = stress(loaded, config, steps=400)
    assert sum(found.kinds.values()) == found.requests > 30
    assert len(found.kinds) >= 6
    assert {"length", "stop", "cancelled"} <= found.endings.keys()
    assert found.preempted > 0
    assert (found.swapped > 0) == (preemption == "swap")
    assert found.cached_tokens > 0
    assert found.drafts > found.accepted > 0
    assert found.checked > 200
    assert found.ties == 0


def test_wrong_greedy_tokens_are_found(loaded: LoadedModel) -> None:
    gaps = greedy_gaps(loaded.model, [([1, 2, 3], [token]) for token in range(272)])
    assert (gaps == 0).sum() == 1
    assert (gaps > 1e-3).sum() == 271


@pytest.mark.parametrize(
    ("broken", "preemption"), [((HostBlocks, "restore"), "swap"), ((KVStorage, "copy_blocks"), "recompute")]
)
def test_blocks_with_wrong_contents_are_found(
    loaded: LoadedModel, broken: tuple[type, str], preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken, lambda *_: None)
    with pytest.raises(StressFailed, match=r"seed 3, after \d+ steps.*below the best"):
        stress(loaded, stress_config(loaded, preemption), steps=1500, seed=3)


def test_from_the_command_line(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = f"bench stress --device cpu --family qwen3_moe --seconds 0.5 --preemption auto --json {result}"
    outcome = CliRunner().invoke(app, command.split())
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(result.read_text())["rows"]
    assert row["name"] == "auto"
    for bad in ("--family gpt5", "--quantization fp7", "--quantization fp8", "--kv-dtype fp8"):
        outcome = CliRunner().invoke(app, f"bench stress --device cpu {bad}".split())
        assert outcome.exit_code == 2
        assert bad.split()[0] in outcome.output


def test_tokens_of_4_bit_weights_are_checked_with_the_same_weights(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = f"bench stress --device cpu --quantization int4 --seconds 1 --preemption recompute --json {result}"
    outcome = CliRunner().invoke(app, command.split())
    assert outcome.exit_code == 0, outcome.output
    written = json.loads(result.read_text())
    assert written["settings"]["quantization"] == "int4"
    assert written["rows"][0]["checked"] > 0
