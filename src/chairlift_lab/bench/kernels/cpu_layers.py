"""The attention of all layers in one call on a CPU, as in a step: calls from Python take as long as short contexts."""

from __future__ import annotations

from typing import Any

from chairlift.kernels.cpu.attention import Cache, Score
from chairlift.kernels.cpu.attention_work import AttentionWork
from chairlift.kernels.cpu.decoder import attend_layer
from chairlift.kernels.cpu.kept_kernels import compiled_and_kept
from chairlift.kernels.cpu.scalar_math import FAST


@compiled_and_kept(FAST)
def attend_layers(
    shared: Any,
    members: int,
    q: Any,
    k: Any,
    v: Any,
    slots: Any,
    keys: Any,
    values: Any,
    tables: Any,
    work: AttentionWork,
    how: Score,
    out: Any,
) -> None:
    """Like `attend_layer`, for each layer of keys and values [layers, blocks, block_size, kv_heads, head_dim]."""
    for layer in range(keys.shape[0]):
        cache = Cache(keys[layer], values[layer], tables)
        attend_layer(shared, members, q, k, v, slots, cache, work, how, out)
