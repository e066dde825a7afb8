"""Checkpoints whose files contradict each other, refused before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.errors import CorruptCheckpoint, InvalidParameter
from chairlift.models.decoder import Decoder
from chairlift.models.fallback.model import TransformersModel
from tests.tiny import write_tiny_checkpoint


def change(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_config_with_more_weights_than_the_files_hold_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    change(folder / "config.json", {"vocab_size": 2**30})
    with pytest.raises(CorruptCheckpoint, match=r"describes [\d,]+ weights, its files hold [\d,]+ bytes"):
        LLM(str(folder), device="cpu")


@pytest.mark.parametrize("eos", ["</s>", [[1]], [1, "x"], {}])
def test_an_eos_token_that_is_no_token_id_is_refused(eos: Any, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    change(folder / "generation_config.json", {"eos_token_id": eos})
    with pytest.raises(CorruptCheckpoint, match="eos_token_id must be a token id or a list"):
        LLM(str(folder), device="cpu")


def test_model_impl_runs_the_same_model_on_transformers_code(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = {}
    for name in ("native", "transformers"):
        llm = LLM(str(folder), model_impl=name, device="cpu", dtype="float32", kv_memory="1MiB", progress=False)
        model = llm.runner.model
        assert isinstance(model, Decoder if name == "native" else TransformersModel)
        found[name] = llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids
    assert found["native"] == found["transformers"]


def test_native_code_is_refused_for_other_families(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    with pytest.raises(InvalidParameter, match=r"model_impl: native is not possible: there is no family 'gpt_neox'"):
        LLM(str(folder), model_impl="native", device="cpu", kv_memory="1MiB", progress=False)
