"""Reading the config.json of a known family into a DecoderConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from itertools import count
from typing import Any

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.recurrent import RecurrentLayer
from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.layers.indexer import IndexShape
from chairlift.layers.latent_attention import LatentShape
from chairlift.layers.mlp import ACTIVATIONS
from chairlift.layers.rope import Rope
from chairlift.models.config import DecoderConfig, DecoderTraits, LayerConfig
from chairlift.models.experts import ExpertsConfig, expert_size, read_experts
from chairlift.models.families import Family, find_family
from chairlift.models.fields import MAX_LAYERS, Fields
from chairlift.models.recurrent import LayerBlocks
from chairlift.models.rope_config import ROPE_SETTINGS, make_rope, rope_parameters, scaled_length
from chairlift.models.wrappers import text_config

MAX_HEAD_DIM = 2**14  # a rope has half as many frequencies
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6}


def decoder_config(config: Mapping[str, Any], max_len: int | None = None) -> DecoderConfig:
    """Read the config.json of a known family; `max_len` promises that no sequence will be longer."""
    inner = text_config(config)
    family = find_family(inner["model_type"])
    assert family is not None, "the caller checks it"
    renamed = {name: inner[own] for own, name in family.aliases.items() if own in inner}
    fields = Fields(dict(inner) | renamed, _DEFAULTS | dict(family.defaults), "config.json")
    activation = fields.text(family.activation_key)
    if activation not in (activations := (*ACTIVATIONS, "xielu")):
        raise UnsupportedModel(f"activation {activation!r} is not supported; supported: {', '.join(activations)}")
    if fields.raw("use_bidirectional_attention") not in (None, False, "vision"):  # there are no images here
        raise UnsupportedModel("use_bidirectional_attention: only causal models can generate text")
    if fields.raw("is_causal") is False:  # Embedding models say it, and transformers takes it from any config.
        raise UnsupportedModel("is_causal is false: attention to later tokens is not supported")
    hidden_size = fields.integer("hidden_size")
    limit = fields.integer("max_position_embeddings")
    limit = scaled_length(rope_parameters(fields, "full_attention"), limit)
    if max_len is not None and not 1 <= max_len <= limit:
        raise InvalidParameter("max_model_len", f"must be between 1 and the model's {limit}, got {max_len}")
    longest = limit if max_len is None else max_len
    input_size = fields.optional_integer("hidden_size_per_layer_input", low=0) or 0
    rows, vocab_size = fields.optional_integer("vocab_size_per_layer_input"), fields.integer("vocab_size")
    if input_size and rows != vocab_size:
        raise UnsupportedModel(f"vocab_size_per_layer_input ({rows}) must be the vocab_size ({vocab_size})")
    gate, down = fields.items("mlp_multipliers", (int, float), length=2) if "mlp_multipliers" in fields else (1, 1)
    parallel = _is_on(fields, family.parallel_block)
    traits = {each.name: getattr(family, each.name) for each in dataclass_fields(DecoderTraits)}
    if parallel:
        traits["norms"] = replace(family.norms, before_mlp=family.norms.before_attention)
    return DecoderConfig(
        **traits,
        family=inner["model_type"],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_len=longest,
        layers=_layers(family, fields, longest),
        activation=activation,
        norm_eps=fields.number(family.eps_key),
        qk_norm=family.qk_norm if family.qk_norm_switch is None or fields.flag(family.qk_norm_switch) else None,
        qkv_bias=_is_on(fields, family.qkv_bias),
        output_bias=_is_on(fields, family.output_bias),
        mlp_bias=_is_on(fields, family.mlp_bias),
        tied_head=fields.flag("tie_word_embeddings"),
        embedding_scale=hidden_size**0.5
        if family.scaled_embeddings
        else fields.optional_number("embedding_multiplier") or 1.0,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        text_part_only=inner is not config,
        qkv_clip=fields.optional_number("clip_qkv"),
        parallel_block=parallel,
        attention_output_scale=_multiplier(fields, "attention_in_multiplier", "attention_out_multiplier"),
        mlp_multipliers=(float(gate), float(down)),
        residual_multiplier=fields.optional_number("residual_multiplier") or 1.0,
        # Cohere multiplies its logits, Granite divides them.
        logit_scale=_multiplier(fields, "logit_scale", "lm_head_multiplier") / _multiplier(fields, "logits_scaling"),
        per_layer_input_size=input_size,
        num_mtp_layers=fields.optional_integer("num_nextn_predict_layers", low=0) or 0,
    )


def _is_on(fields: Fields, switch: str | bool) -> bool:
    """A property of a family: always there or never, or by a flag of the config."""
    return switch if isinstance(switch, bool) else fields.flag(switch)


def _multiplier(fields: Fields, *names: str) -> float:
    """The product of multipliers; those that the config does not have are 1."""
    return math.prod(fields.optional_number(name) or 1.0 for name in names)


def _layers(family: Family, fields: Fields, max_len: int) -> tuple[LayerConfig, ...]:
    if family.recurrent is None:
        blocks = [LayerBlocks(attention=True)] * fields.integer("num_hidden_layers", high=MAX_LAYERS)
    else:
        blocks = family.recurrent.blocks(fields)
    types = _layer_types(family, fields, len(blocks))
    experts = None if family.experts is None else read_experts(family.experts, fields)
    latent = read_latent(fields) if family.latent else None
    shape = None if family.recurrent is None else family.recurrent.shape(fields)
    sources = _kv_sources(fields, types)
    stored: dict[int, int] = {}  # layers with attention -> their index in the storage of keys and values
    indexes = count(len(types))  # Indexes of sparse attention are stored behind all layers.
    recurrents = count()  # indices in the storage of states
    layers = []
    for index, (layer_type, block) in enumerate(zip(types, blocks, strict=True)):
        source = sources[index]
        own = _layer_fields(fields, index, layer_type)
        storage_index = stored[source] if source is not None else len(stored)
        attention = _attention(family, own, latent, storage_index, layer_type) if block.attention else None
        if block.attention and source is None:
            stored[index] = storage_index
        chooses = _chooses(family, fields, index, len(types), max_len) if latent is not None else None
        rotated = attention is not None and family.rotated(fields, index, layer_type)
        layers.append(
            LayerConfig(
                attention=attention,
                latent=latent if block.attention else None,
                index=_index(fields, next(indexes)) if chooses else None,
                shares_choice=chooses is False,
                rope=_rope(family, fields, layer_type, attention, max_len, rotated=rotated) if attention else None,
                recurrent=RecurrentLayer(next(recurrents), shape.states()) if shape and block.recurrent else None,
                mixer=shape if block.recurrent else None,
                shares_kv=source is not None,
                keeps_kv=index in sources,
                values_are_keys=fields.flag("attention_k_eq_v") and layer_type == "full_attention",
                **_feed_forward(family, fields, experts, index, doubled=source is not None)
                if block.mlp
                else {"intermediate_size": 0},
            )
        )
    return tuple(layers)


def _kv_sources(fields: Fields, types: list[str]) -> list[int | None]:
    """For each layer the earlier one whose keys and values it reads, if it has none of its own.

    These are the last layers, and each reads those of the last layer before them that has its type.
    """
    own = len(types) - (fields.optional_integer("num_kv_shared_layers", low=0) or 0)
    last = {layer_type: index for index, layer_type in enumerate(types[: max(own, 0)])}
    if not set(types) <= last.keys():
        raise CorruptCheckpoint("config.json: num_kv_shared_layers leaves a layer type without keys and values")
    return [None if index < own else last[layer_type] for index, layer_type in enumerate(types)]


def _layer_fields(fields: Fields, index: int, layer_type: str) -> Fields:
    """The fields with those of one layer, under either of the names that Gemma 4's configs have for them."""
    every = fields.section("per_layer_config")
    own = next((own for name, own in every.items() if str(name).isdecimal() and int(name) == index), None)  # "05"
    named = "per_layer_config" in fields  # if it is empty, all layers have the same sizes
    if own is None and not named and layer_type == "full_attention" and "global_head_dim" in fields:
        own = {"head_dim": fields.raw("global_head_dim")}
        if fields.flag("attention_k_eq_v") and "num_global_key_value_heads" in fields:
            own["num_key_value_heads"] = fields.raw("num_global_key_value_heads")
    return fields if own is None else fields.updated(own)


def _attention(
    family: Family, fields: Fields, latent: LatentShape | None, index: int, layer_type: str
) -> AttentionLayer:
    if latent is not None:
        return latent_layer(latent, fields, rope_parameters(fields, layer_type), index)
    heads, kv_heads, head_dim = _heads(fields)
    scale = fields.optional_number("attention_multiplier")
    if scale is None:
        scale = (fields.optional_number("query_pre_attn_scalar") or head_dim) ** -0.5
    # Factors of queries and keys are factors of scores.
    scale *= _multiplier(fields, "key_multiplier", "attention_in_multiplier", "attention_in_multiplier")
    return AttentionLayer(
        index=index,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        window=fields.integer("sliding_window") if layer_type == "sliding_attention" else None,
        softcap=fields.optional_number("attn_logit_softcapping"),
        chunk=fields.integer("attention_chunk_size") if layer_type == "chunked_attention" else None,
        sinks=family.sinks,
    )


def _rope(
    family: Family, fields: Fields, layer_type: str, attention: AttentionLayer, max_len: int, *, rotated: bool
) -> Rope | None:
    if not rotated:
        scaling = family.query_scaling(fields)
        return None if scaling is None else Rope((), query_scaling=scaling)
    return make_rope(
        rope_parameters(fields, layer_type, scales_local=family.scales_local_rope),
        head_dim=attention.head_dim - (attention.latent_dim or 0),
        max_positions=fields.integer("max_position_embeddings"),
        max_len=max_len,
    )


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, key/value heads, dimensions per head."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CorruptCheckpoint(
            f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % heads:
            raise CorruptCheckpoint(
                f"config.json: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({heads})"
            )
        head_dim = hidden_size // heads
    if head_dim > MAX_HEAD_DIM:
        raise CorruptCheckpoint(f"config.json: head_dim must be at most {MAX_HEAD_DIM}, it is {head_dim}")
    return heads, kv_heads, head_dim


def _layer_types(family: Family, fields: Fields, num_layers: int) -> list[str]:
    """Each layer's attention: "full_attention", "sliding_attention" or "chunked_attention"."""
    if family.recurrent is not None:
        return ["full_attention"] * num_layers
    if family.chunked:
        if "layer_types" in fields:
            return _listed_types(fields, num_layers, ("full_attention", "chunked_attention"))
        chunked = [family.rotated(fields, index, "") for index in range(num_layers)]
        return ["chunked_attention" if each else "full_attention" for each in chunked]
    if "sliding_window" not in fields or (family.window_switch and not fields.flag("use_sliding_window")):
        return ["full_attention"] * num_layers
    if "layer_types" not in fields:
        return [
            "sliding_attention" if family.windowed(fields, index) else "full_attention" for index in range(num_layers)
        ]
    return _listed_types(fields, num_layers, ("full_attention", "sliding_attention"))


def _listed_types(fields: Fields, num_layers: int, supported: tuple[str, ...]) -> list[str]:
    types = fields.items("layer_types", str, length=num_layers)
    for layer_type in types:
        if layer_type not in supported:
            raise UnsupportedModel(f"layer type {layer_type!r} is not supported in this family")
    return types


def _feed_forward(
    family: Family, fields: Fields, experts: ExpertsConfig | None, index: int, *, doubled: bool
) -> dict[str, Any]:
    """The sizes of a layer's feed-forward block: dense, or a mixture of experts."""
    if experts is None or family.experts is None or not family.experts.has_experts(fields, index):
        factor = 2 if doubled and fields.flag("use_double_wide_mlp") else 1
        return {"intermediate_size": factor * family.inner_size(fields)}
    return {"intermediate_size": expert_size(fields), "experts": experts}


MAX_DIM = 2**14


def _chooses(family: Family, fields: Fields, index: int, num_layers: int, max_len: int) -> bool | None:
    """Whether a layer chooses the positions that it attends to, or uses those of an earlier one; None: its attention is
    dense, as it also is where no sequence has more tokens than are chosen."""
    if not family.sparse:
        if "index_topk" in fields:
            raise UnsupportedModel("index_topk: it chooses keys by sparse attention, which this family does not have")
        return None
    if max_len <= fields.integer("index_topk"):
        return None
    if "indexer_types" in fields:
        types = fields.items("indexer_types", str, length=num_layers)
    elif "index_topk_pattern" in fields:
        named = {"F": "full", "S": "shared"}
        types = [named.get(each, each) for each in map(str, fields.raw("index_topk_pattern"))]
    else:
        every = max(1, fields.optional_integer("index_topk_freq", low=0) or 1)
        offset = 2 if "index_skip_topk_offset" not in fields else fields.integer("index_skip_topk_offset", low=0)
        types = ["shared" if max(each - offset + 1, 0) % every else "full" for each in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"full", "shared"} or types[0] != "full":
        raise CorruptCheckpoint(
            f"config.json: the {num_layers} layers must be full or shared, and the first full, in indexer_types or "
            "index_topk_pattern"
        )
    return bool(types[index] == "full")


def _index(fields: Fields, storage_index: int) -> IndexShape:
    size, rope_dim = fields.integer("index_head_dim", high=MAX_DIM), fields.integer("qk_rope_head_dim", high=MAX_DIM)
    if rope_dim > size:
        raise CorruptCheckpoint(f"config.json: index_head_dim ({size}) must have room for the {rope_dim} of rotation")
    if "q_lora_rank" not in fields:
        raise UnsupportedModel("index_topk without q_lora_rank: an index reads the latents of queries")
    heads, count = fields.integer("index_n_heads", high=MAX_DIM), fields.integer("index_topk")
    layer = AttentionLayer(storage_index, heads, 1, size, 1.0, latent_dim=size, chooses=count)
    return IndexShape(layer, rope_dim, fields.flag("indexer_rope_interleave"))


def read_latent(fields: Fields) -> LatentShape:
    """The sizes of latent attention, under DeepSeek's names."""
    if fields.raw("use_mla") is False:
        raise UnsupportedModel("use_mla is false: in this family attention without latents is not supported")
    sizes = {
        name: fields.integer(key, high=MAX_DIM)
        for name, key in (
            ("rank", "kv_lora_rank"),
            ("nope_dim", "qk_nope_head_dim"),
            ("rope_dim", "qk_rope_head_dim"),
            ("value_dim", "v_head_dim"),
        )
    }
    q_rank = fields.integer("q_lora_rank", high=2**17) if "q_lora_rank" in fields else None
    return LatentShape(
        q_rank=q_rank,
        bias=fields.flag("attention_bias"),
        interleaved_rope=fields.flag("rope_interleave"),
        **sizes,
    )


def latent_layer(shape: LatentShape, fields: Fields, rope: Mapping[str, Any], index: int) -> AttentionLayer:
    """A layer as its cache sees it: one head of keys, whose first numbers are the values."""
    return AttentionLayer(
        index=index,
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=shape.rank + shape.rope_dim,
        scale=(shape.nope_dim + shape.rope_dim) ** -0.5 * _yarn_scale(Fields(rope, {}, ROPE_SETTINGS)) ** 2,
        latent_dim=shape.rank,
    )


def _yarn_scale(rope: Fields) -> float:
    """The part of yarn's attention factor that also multiplies the dimensions without rotation."""
    factor = rope.optional_number("factor") or 1.0
    if not rope.raw("mscale_all_dim") or factor <= 1:
        return 1.0
    if (rope.raw("rope_type") or rope.raw("type") or "default") == "default":
        return 1.0
    return 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0
