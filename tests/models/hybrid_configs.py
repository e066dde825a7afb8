"""Tiny configs of the families with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.models.checkpoints import SIZES

transformers = pytest.importorskip("transformers")


def _config(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**(SIZES | changes))


RECURRENT, FULL = "linear_attention", "full_attention"
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "layer_types": [RECURRENT, FULL, RECURRENT],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 18,
}
HYBRID_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3 next": _config("Qwen3NextConfig", **_DELTA, **_EXPERTS),
    "qwen3 next, some layers dense": _config(
        "Qwen3NextConfig",
        **_DELTA | {"layer_types": None, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
        **_EXPERTS,
        num_hidden_layers=4,
        mlp_only_layers=[1],
    ),
    "qwen3.5": _config("Qwen3_5TextConfig", **_DELTA, tie_word_embeddings=True),
    "qwen3.5 moe": _config("Qwen3_5MoeTextConfig", **_DELTA, **_EXPERTS),
}
