"""Checkpoints whose files contradict each other, refused before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM
from chairlift.errors import CorruptCheckpoint
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
