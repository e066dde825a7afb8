"""The rules that families name: which layers have what, and sizes that a config does not state plainly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chairlift.errors import CorruptCheckpoint
from chairlift.layers.rope import QueryScaling
from chairlift.models.fields import Fields
from chairlift.models.recurrent import nemotron_blocks


def rotated_by_list(fields: Fields, index: int, layer_type: str = "") -> bool:
    """SmolLM3 has no rotation in some layers: where `no_rope_layers` is 0, or in every nth."""
    if "no_rope_layers" in fields:
        marks = fields.items("no_rope_layers", int)
        if marks and len(marks) <= index:
            raise CorruptCheckpoint(f"config.json: no_rope_layers has {len(marks)} entries, layer {index} has none")
        if marks:
            return bool(marks[index])
    interval = fields.optional_integer("no_rope_layer_interval")
    return interval is None or (index + 1) % interval != 0


def all_but_every_nth(fields: Fields, index: int) -> bool:
    return (index + 1) % fields.integer("sliding_window_pattern") != 0


# Which layers have the sliding window.
WINDOWED: dict[str, Callable[[Fields, int], bool]] = {
    "every_layer": lambda fields, index: True,
    "every_second_layer": lambda fields, index: index % 2 == 0,
    "upper_layers": lambda fields, index: index >= fields.integer("max_window_layers", low=0),
    "all_but_every_nth": all_but_every_nth,
    "all_but_last_and_every_nth": lambda fields, index: (
        all_but_every_nth(fields, index) and index + 1 < fields.integer("num_hidden_layers")
    ),
    "layers_without_rope": lambda fields, index: not rotated_by_list(fields, index),
}

# Which layers, by their index and type, rotate queries and keys.
ROTATED: dict[str, Callable[[Fields, int, str], bool]] = {
    "rotated_by_list": rotated_by_list,
    # Layers with full attention have no rotation if others have a window.
    "rotated_in_windows": lambda fields, _, kind: kind == "sliding_attention" or "sliding_window" not in fields,
    "rotated_only_in_windows": lambda fields, _, kind: kind == "sliding_attention",
    "rotated_if_asked": lambda fields, *_: bool(fields.raw("position_embedding_type") == "rope"),
    "not_rotated": lambda *_: False,
}


def temperature(fields: Fields) -> QueryScaling | None:
    if not fields.raw("attn_temperature_tuning"):  # true, or a number in older files
        return None
    return QueryScaling(fields.number("attn_scale"), fields.integer("floor_scale"), offset=1)


def adjusted_size(fields: Fields) -> int:
    """LFM2: two thirds of the given size, rounded up, unless the config says that it is the size itself."""
    size = fields.integer("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in fields:
        size, multiple = int(fields.number("block_ffn_dim_multiplier") * size), fields.integer("block_multiple_of")
        size = -(-size // multiple) * multiple
    return size


# The inner size of dense blocks.
INNER_SIZE: dict[str, Callable[[Fields], int]] = {
    "intermediate_size": lambda fields: fields.integer("intermediate_size"),
    "dense_size": lambda fields: fields.integer("intermediate_size_mlp"),  # Llama 4 has another one for its experts.
    # Granite 4 has a dense block beside its experts, or instead of them.
    "shared_size": lambda fields: fields.integer("shared_intermediate_size"),
    "adjusted_size": adjusted_size,
}


# The rules of fields of `Family`, by the names that .toml files have for them.
BY_FIELD: dict[str, Mapping[str, Callable[..., Any]]] = {
    "windowed": WINDOWED,
    "rotated": ROTATED,
    "inner_size": INNER_SIZE,
    "query_scaling": {"temperature": temperature},
}


def experts_by_list_or_every_nth(fields: Fields, index: int) -> bool:
    if "moe_layers" in fields:
        return index in fields.items("moe_layers", int)
    return (index + 1) % fields.integer("interleave_moe_layer_step") == 0


def experts_between_layers(fields: Fields, index: int) -> bool:
    last = fields.raw("moe_layer_end_index")
    last = fields.integer("num_hidden_layers") - 1 if last in (None, -1) else fields.integer("moe_layer_end_index")
    first, every = fields.integer("moe_layer_start_index", low=0), fields.integer("moe_layer_interval")
    return first <= index <= last and (index + 1) % every == 0


# Which layers have experts.
HAS_EXPERTS: dict[str, Callable[[Fields, int], bool]] = {
    "experts_by_list_or_every_nth": experts_by_list_or_every_nth,
    "experts_in_upper_layers": lambda fields, index: index >= fields.integer("num_dense_layers", low=0),
    "experts_by_pattern": lambda fields, index: nemotron_blocks(fields)[index] == "moe",
    "experts_between_layers": experts_between_layers,
}
