"""Adapters for tests: random ones, canaries that force a token, and checkpoints with an adapter merged into them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT = "base_model.model."
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(ALL), "bias": "none"}


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Write tensors by module and side, such as "model.layers.0.self_attn.q_proj.lora_A"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    named = {f"{PEFT}{name}.weight": tensor.clone() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def write_random(
    folder: Path, base: Path, rank: int = 4, *, seed: int = 0, scale: float = 0.3, targets: tuple[str, ...] = ALL
) -> Path:
    """A random adapter of the Llama checkpoint in `base`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights_of(base).items():
        if name.removesuffix(".weight").rpartition(".")[2] in targets:
            module = name.removesuffix(".weight")
            tensors[f"{module}.lora_A"] = torch.randn(rank, weight.shape[1], generator=generator) * scale
            tensors[f"{module}.lora_B"] = torch.randn(weight.shape[0], rank, generator=generator) * scale
    return write_adapter(folder, tensors, r=rank, lora_alpha=rank)


def weights_of(base: Path) -> dict[str, Tensor]:
    return load_file(base / "model.safetensors")


def merge(folder: Path, base: Path, adapters: Mapping[Path, float]) -> Path:
    """A copy of the checkpoint in `base` with adapters, times their weights, added to its weights."""
    shutil.copytree(base, folder)
    weights = weights_of(base)
    for adapter, weight in adapters.items():
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in tensors:
            if not name.endswith(".lora_A.weight"):
                continue
            a, b = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
            module = name.removeprefix(PEFT).removesuffix(".lora_A.weight")
            merged = weights[f"{module}.weight"].double() + weight * config["lora_alpha"] / len(a) * (b @ a)
            weights[f"{module}.weight"] = merged.float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_canary(folder: Path, base: Path, token: int) -> Path:
    """An adapter with which the model of `base` says nothing but `token`.

    In the last layer, pairs of inner units have the inputs z and -z for both gate and up. Of each pair one is large and
    positive, whatever the row is, and all of them write the token's row of the head to the residual stream.
    """
    config, weights = json.loads((base / "config.json").read_text()), weights_of(base)
    hidden, inner, layer = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"] - 1
    pairs = 8
    directions = torch.randn(pairs, hidden, generator=torch.Generator().manual_seed(7))
    units = torch.zeros(inner, pairs)
    for pair in range(pairs):
        units[2 * pair, pair], units[2 * pair + 1, pair] = 20.0, -20.0
    first = torch.zeros(pairs, inner)
    first[0, : 2 * pairs] = 1.0
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])[token]
    second = torch.zeros(hidden, pairs)
    second[:, 0] = 50.0 * head / head.norm()
    mlp = f"model.layers.{layer}.mlp"
    tensors = {f"{mlp}.gate_proj.lora_A": directions, f"{mlp}.gate_proj.lora_B": units}
    tensors |= {f"{mlp}.up_proj.lora_A": directions, f"{mlp}.up_proj.lora_B": units}
    tensors |= {f"{mlp}.down_proj.lora_A": first, f"{mlp}.down_proj.lora_B": second}
    return write_adapter(folder, tensors, r=pairs, lora_alpha=pairs)
