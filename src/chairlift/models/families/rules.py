"""The rules that families name: which layers have what, and sizes that a config does not state plainly."""

from __future__ import annotations

from chairlift.errors import CorruptCheckpoint
from chairlift.layers.rope import QueryScaling
from chairlift.models.fields import Fields
from chairlift.models.recurrent import nemotron_blocks

# ---- which layers have the sliding window ----------------------------------------------------------------------------


def every_layer(fields: Fields, index: int) -> bool:
    return True


def every_second_layer(fields: Fields, index: int) -> bool:
    return index % 2 == 0


def upper_layers(fields: Fields, index: int) -> bool:
    return index >= fields.integer("max_window_layers", low=0)


def all_but_every_nth(fields: Fields, index: int) -> bool:
    return (index + 1) % fields.integer("sliding_window_pattern") != 0


def all_but_last_and_every_nth(fields: Fields, index: int) -> bool:
    return all_but_every_nth(fields, index) and index + 1 < fields.integer("num_hidden_layers")


def layers_without_rope(fields: Fields, index: int) -> bool:
    return not rotated_by_list(fields, index, "")


# ---- which layers rotate queries and keys, and what others do --------------------------------------------------------


def rotated_by_list(fields: Fields, index: int, layer_type: str) -> bool:
    """SmolLM3 has no rotation in some layers: where `no_rope_layers` is 0, or in every nth."""
    if "no_rope_layers" in fields:
        marks = fields.items("no_rope_layers", int)
        if marks and len(marks) <= index:
            raise CorruptCheckpoint(f"config.json: no_rope_layers has {len(marks)} entries, layer {index} has none")
        if marks:
            return bool(marks[index])
    interval = fields.optional_integer("no_rope_layer_interval")
    return interval is None or (index + 1) % interval != 0


def rotated_in_windows(fields: Fields, index: int, layer_type: str) -> bool:
    """Layers with full attention have no rotation if others have a window."""
    return layer_type == "sliding_attention" or "sliding_window" not in fields


def rotated_only_in_windows(fields: Fields, index: int, layer_type: str) -> bool:
    """Layers with full attention have no rotation."""
    return layer_type == "sliding_attention"


def rotated_if_asked(fields: Fields, index: int, layer_type: str) -> bool:
    return bool(fields.raw("position_embedding_type") == "rope")


def not_rotated(fields: Fields, index: int, layer_type: str) -> bool:
    return False


def no_scaling(fields: Fields) -> QueryScaling | None:
    return None


def temperature(fields: Fields) -> QueryScaling | None:
    if not fields.raw("attn_temperature_tuning"):  # true, or a number in older files
        return None
    return QueryScaling(fields.number("attn_scale"), fields.integer("floor_scale"), offset=1)


# ---- the inner size of dense blocks ----------------------------------------------------------------------------------


def intermediate_size(fields: Fields) -> int:
    return fields.integer("intermediate_size")


def dense_size(fields: Fields) -> int:
    """Llama 4 has another one for its experts."""
    return fields.integer("intermediate_size_mlp")


def shared_size(fields: Fields) -> int:
    """Granite 4 has a dense block beside its experts, or instead of them."""
    return fields.integer("shared_intermediate_size")


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


# ---- which layers have experts ---------------------------------------------------------------------------------------


def experts_by_list_or_every_nth(fields: Fields, index: int) -> bool:
    if "moe_layers" in fields:
        return index in fields.items("moe_layers", int)
    return (index + 1) % fields.integer("interleave_moe_layer_step") == 0


def experts_in_upper_layers(fields: Fields, index: int) -> bool:
    return index >= fields.integer("num_dense_layers", low=0)


def experts_by_pattern(fields: Fields, index: int) -> bool:
    return nemotron_blocks(fields)[index] == "moe"


def experts_between_layers(fields: Fields, index: int) -> bool:
    last = fields.raw("moe_layer_end_index")
    last = fields.integer("num_hidden_layers") - 1 if last in (None, -1) else fields.integer("moe_layer_end_index")
    first, every = fields.integer("moe_layer_start_index", low=0), fields.integer("moe_layer_interval")
    return first <= index <= last and (index + 1) % every == 0
