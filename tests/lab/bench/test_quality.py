"""`bench quality` on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.engine.startup import load_model, start_engine
from chairlift.errors import InvalidParameter
from chairlift_lab.bench.quality import (
    CPU_MODES,
    PIECE,
    Scores,
    cut,
    measure_quality,
    parse_modes,
    score,
    text_to_score,
)
from tests.tiny import SENTENCES, write_tiny_checkpoint, write_windowed_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("quality") / "tiny"))


@pytest.mark.parametrize("write", [write_tiny_checkpoint, write_windowed_checkpoint], ids=["llama", "gemma3"])
def test_scores_equal_those_of_transformers(write: Callable[[Path], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(write(tmp_path / "model"))
    config = EngineConfig(device="cpu", dtype="float32", kv_dtype="float32", quantization="none", kv_memory="1MiB")
    loaded = load_model(folder, config, progress=False)
    started = start_engine(loaded, config)
    tokens = loaded.tokenizer.encode(" ".join(SENTENCES))
    found = score(started, tokens)
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    assert torch.allclose(found.losses, expected, atol=1e-3)
    assert torch.equal(found.likeliest, logits.argmax(-1))


def test_a_text_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", kv_memory="64KiB")
    loaded = load_model(str(write_windowed_checkpoint(tmp_path / "model")), config, progress=False)
    with pytest.raises(InvalidParameter, match="room for"):
        score(start_engine(loaded, config), [7] * 250)


@pytest.mark.parametrize("int8", ["int8, KV bfloat16", pytest.param("int8, KV float32", marks=pytest.mark.slow)])
def test_modes_are_compared_with_float32(tiny: str, int8: str) -> None:
    """The kernel for 8-bit weights is compiled for each type of the cache, which takes long."""
    modes = [int8, "float32, KV bfloat16"]
    exact, *lossy = measure_quality(tiny, modes, lambda _: None, texts=SENTENCES)
    assert [exact[key] for key in ("name", "perplexity_change", "greedy_agreement")] == ["float32", 0.0, 1.0]
    assert [row["name"] for row in lossy] == modes
    for row in lossy:
        assert row["perplexity_change"] != 0.0
        assert 0.0 < row["standard_error"] < 1.0
        assert math.isclose(row["perplexity_change"], row["perplexity"] / exact["perplexity"] - 1, rel_tol=1e-9)
        assert 0.5 < row["greedy_agreement"] <= 1.0
    assert lossy[0]["weight_bytes"] < exact["weight_bytes"]
    assert 2 * lossy[1]["kv_bytes_per_token"] == exact["kv_bytes_per_token"]


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    assert math.isclose(Scores(torch.full((7,), math.log(5.0)), torch.zeros(7)).perplexity, 5.0, rel_tol=1e-6)


def test_standard_error_is_that_of_paired_differences() -> None:
    reference = Scores(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4))
    worse = Scores(torch.tensor([1.1, 2.1, 3.1, 4.1]), torch.zeros(4))
    assert math.isclose(worse.standard_error(reference), 0.0, abs_tol=1e-6)
    spread = Scores(torch.tensor([1.2, 1.8, 3.2, 3.8]), torch.zeros(4))
    assert math.isclose(spread.standard_error(reference), 0.1, rel_tol=1e-5)


def test_long_texts_are_cut(tmp_path: Path) -> None:
    tokens = list(range(2 * PIECE + 1))
    assert [len(piece) for piece in cut(tokens)] == [PIECE, PIECE]
    assert [len(piece) for piece in cut([*tokens[:-1], 7, 8])] == [PIECE, PIECE, 2]
    pieces = cut(tokens, [0])
    assert [(piece[:2], len(piece)) for piece in pieces] == [
        ([0, 1], PIECE),
        ([0, PIECE], PIECE),
        ([0, 2 * PIECE - 1], 3),
    ]
    assert cut(tokens[:9], [5]) == [tokens[:9]]
    (tmp_path / "a.txt").write_text("Some words.")
    assert text_to_score(tmp_path / "a.txt") == "Some words."
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(InvalidParameter, match=r"text: .*has no text"):
        text_to_score(tmp_path / "empty.txt")
    with pytest.raises(InvalidParameter, match=r"text: cannot read"):
        text_to_score(tmp_path / "missing.txt")


def test_modes_are_parsed_by_name() -> None:
    assert parse_modes("float32; int8, KV bfloat16") == ["float32", "int8, KV bfloat16"]
    with pytest.raises(InvalidParameter, match="there is no 'int4'"):
        parse_modes("int4")
    assert set(parse_modes(";".join(CPU_MODES))) == set(CPU_MODES)
