"""GGUF files of a small Llama with random weights."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from chairlift_lab.make_model import write_random_gguf

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 49_152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
}


def random_gguf(folder: Path, format: str, **changes: Any) -> Path:
    """Write a file that tests may change; its content is computed once, which takes seconds."""
    path = folder / f"{format}.gguf"
    path.write_bytes(_content(format, json.dumps(changes, sort_keys=True)))
    return path


@lru_cache(maxsize=4)
def _content(format: str, changes: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_random_gguf(SHAPE | json.loads(changes), format, path, lambda note: None)
        return path.read_bytes()
