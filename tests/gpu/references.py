"""The reference of each tiny family on a GPU machine, whose transformers may be older than in constraints.txt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from chairlift.models.base import CausalLM
from tests.models.checkpoints import CPU, load, make_reference, run_alone, save
from tests.models.hybrid_configs import HYBRID_CONFIGS
from tests.models.test_families import CONFIGS

# Recurrent layers first: the kernels of the others are reached by more tests.
NAMES = [*HYBRID_CONFIGS, *(name for name in CONFIGS if name not in HYBRID_CONFIGS)]

FIXED_IN = Version("5.23")
_ONE_NORM = "norms all groups of Mamba 2 heads together, not each by itself as the published models do"
UNLIKE_PUBLISHED = {
    "gpt oss": "ignores swiglu_limit and clamps at 7",
    "minimax_m2": "ignores rotary_dim and rotates all dimensions of a head",
    "mamba 2": _ONE_NORM,
    "bamba": _ONE_NORM,
    "granite 4": _ONE_NORM,
    "granite 4 dense, rope": _ONE_NORM,
}
"""What transformers before 5.23 does with these models; all others have the same logits as 5.23."""

# transformers does not limit the time steps of single tokens, so its cached steps differ from whole sequences.
NOT_CACHED = {"mamba 2, biases, limited steps"}


def difference_of(name: str, version: str = transformers.__version__) -> str | None:
    """Why this version of transformers is no reference for a family; None if it is one."""
    if Version(version) >= FIXED_IN or name not in UNLIKE_PUBLISHED:
        return None
    return f"transformers {version} {UNLIKE_PUBLISHED[name]}"


class OwnReference:
    """Our model in float32 on a CPU, sequence by sequence and without a cache, called as those of transformers are.

    Where transformers is new enough, tests/models/test_families.py compares the same computation with it.
    """

    device = CPU

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=run_alone(self._model, ids[0])[None])

    def generate(self, ids: Tensor, *, max_new_tokens: int, **_: Any) -> Tensor:
        for _step in range(max_new_tokens):
            ids = torch.cat((ids, self(ids).logits[:, -1:].argmax(-1)), dim=1)
        return ids


def saved_reference(name: str, folder: Path, device: torch.device, version: str = transformers.__version__) -> Any:
    """Write a tiny model of a family to `folder`; return what its greedy tokens are compared with."""
    hf = make_reference(CONFIGS[name]())
    save(hf, folder)
    if difference_of(name, version) is not None:
        return OwnReference(load(folder))
    if name in NOT_CACHED:
        hf.generation_config.use_cache = False
    return hf.to(device)
