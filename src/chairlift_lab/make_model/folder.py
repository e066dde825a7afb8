"""Writes a checkpoint folder with random weights and without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chairlift.models.dummy import dummy_tensors


def write_random_folder(config: dict[str, Any], path: Path, note: Callable[[str], None]) -> None:
    """Write config.json and bfloat16 weights in one safetensors file per GB."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    weight_map: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    size = count = 0

    def save() -> None:
        nonlocal part, size, count
        file = f"model-{count:05}.safetensors"
        save_file(part, path / file)
        weight_map.update(dict.fromkeys(part, file))
        part, size, count = {}, 0, count + 1

    for name, tensor in dummy_tensors(config, torch.device("cpu")):
        note(name)
        part[name] = tensor.to(torch.bfloat16).contiguous()
        size += part[name].nbytes
        if size > 1e9:
            save()
    if part:
        save()
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
