"""Random weights for vLLM, drawn as ours are (`models/dummy.py`).

vLLM's own random weights are between -0.001 and 0.001, those of norms included, and the same in every layer. With them
all requests of a model with latent attention soon have the same state, so that a batch of any size reads the experts of
one token.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SPREAD = 0.02


def draw_weights_as_ours(proof: Path) -> None:
    """Replace how vLLM draws weights in this process and those that it forks; the file `proof` shows that it did so."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    from vllm.model_executor.model_loader import dummy_loader

    def draw(layer: Any, _config: Any) -> None:
        proof.touch()
        draw_all(layer)

    dummy_loader.initialize_dummy_weights = draw
    dummy_loader.initialize_single_dummy_weight = _draw


def draw_all(layer: Any) -> None:
    """Draw the weights of a layer and its parts, once: vLLM asks for the model's, and then for those of each part."""
    if getattr(layer, "weights_are_drawn", False):
        return
    for part in layer.modules():
        part.weights_are_drawn = True
    for name, weight in layer.state_dict().items():
        _draw(weight, name)


def _draw(weight: Any, name: str = "") -> None:
    import torch

    if weight.device.type == "meta":  # allocated and drawn later
        return
    if weight.dtype == torch.uint8:  # 4-bit floats, and their scales: powers of two
        if "scale" in name:
            weight.data.fill_(120)
        else:
            weight.data.random_(0, 256)
    elif weight.is_floating_point():
        if weight.dim() < 2 or "scale" in name:  # norms, biases and scales
            weight.data.fill_(1.0)
        else:  # through 16 bits, since 8-bit floats cannot be drawn
            drawn = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
            weight.data.copy_(drawn.normal_(0.0, SPREAD))
