"""Llama 4: chunked attention beside layers without rotation, experts whose inputs are weighted."""

from __future__ import annotations

from chairlift.layers.rope import QueryScaling
from chairlift.models.config import PartNames
from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families.base import FAMILIES, Family
from chairlift.models.fields import Fields


def _has_experts(fields: Fields, index: int) -> bool:
    if "moe_layers" in fields:
        return index in fields.items("moe_layers", int)
    return (index + 1) % fields.integer("interleave_moe_layer_step") == 0


def _dense_size(fields: Fields) -> int:
    return fields.integer("intermediate_size_mlp")


def _temperature(fields: Fields) -> QueryScaling | None:
    if not fields.raw("attn_temperature_tuning"):  # true, or a number in older files
        return None
    return QueryScaling(fields.number("attn_scale"), fields.integer("floor_scale"), offset=1)


FAMILIES |= {
    "llama4_text": Family(
        title="Llama 4",
        defaults={
            "vocab_size": 202_048,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "interleave_moe_layer_step": 1,
        },
        names=PartNames(mlp="feed_forward"),
        # After the rotation in the original, which changes neither the size of a head nor, without weights, the result.
        qk_norm="unweighted",
        qk_norm_switch="use_qk_norm",
        inner_size=_dense_size,
        interleaved_rope=True,
        chunked=True,
        query_scaling=_temperature,
        experts=ExpertsFamily(
            names=ExpertNames("feed_forward", router="router", shared="shared_expert", transposed=True),
            scores="sigmoid",
            weights_inputs=True,
            has_experts=_has_experts,
        ),
    ),
}
