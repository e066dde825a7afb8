"""Writes models: random weights in a folder or a GGUF file, and a GGUF file with its matrices in other blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chairlift.errors import InvalidParameter
from chairlift.kernels.cpu.blocks.panels import COLUMNS, IQ4_VALUES, KINDS, BlockKind
from chairlift.loading.gguf.file import GGUFFile
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.loading.resolve import resolve_model
from chairlift.models.dummy import dummy_tensors

# Bytes at which a block has its float16 factor, and that of its minima.
_FACTOR_AT = {"Q6_K": 208}
_MIN_FACTOR_AT = 2
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Names of formats with several kinds: that of most matrices, and of those that matter more.
MIXED = {"q4_k_m": ("Q4_K", "Q6_K"), "q5_k_m": ("Q5_K", "Q6_K")}
FORMATS = (*(name.lower() for name in KINDS if name not in ("Q4_K", "Q5_K")), *MIXED)
# Instead of kinds with 256 columns, where rows are not multiples of it.
SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
UNUSED = 5  # the type of a token in GGUF files

Matrix = tuple[str, int, int]
"""Name, rows and columns of a matrix."""


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


def random_blocks(kind: BlockKind, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """[rows, bytes] of weights with the standard deviation 1 / sqrt(columns)."""
    blocks = np.frombuffer(random.bytes(rows * columns // kind.columns * kind.num_bytes), dtype=np.uint8)
    blocks = blocks.reshape(-1, kind.num_bytes).copy()
    scale = _set_scales(kind, blocks)
    values = np.array(kind.values or range(2**kind.bits), dtype=np.float64)
    factor = 1 / (np.sqrt(columns) * scale * values.std())
    _put(blocks, _FACTOR_AT.get(kind.name, 0), factor)
    if kind.has_min:  # centres the numbers
        low = factor * values.mean() * (1 if kind.nested else -1)
        _put(blocks, _MIN_FACTOR_AT, low)
    return blocks.reshape(rows, -1)


def _set_scales(kind: BlockKind, blocks: np.ndarray) -> float:
    """Give nested scales a middle value; returns it."""
    if not kind.nested:
        return 1.0
    if kind.name == "Q6_K":
        blocks[:, 192:208] = 64
        return 64.0
    if kind.name == "IQ4_XS":  # six bits in two places: 16 + 32 stands for 16
        blocks[:, 2:4] = 0xFF
        blocks[:, 4:8] = 0
        return 16.0
    blocks[:, 4:12] = 32 | 0x80  # six bits of the first four scales and minima, and the upper bits of the others
    blocks[:, 12:16] = 0
    return 32.0


def _put(blocks: np.ndarray, at: int, factor: float) -> None:
    blocks[:, at : at + 2] = np.array([factor], dtype=np.float16).view(np.uint8)


def write_random_gguf(config: dict[str, Any], format: str, path: Path, note: Callable[[str], None]) -> None:
    """Write a file of `config`'s shape; `format` is one of FORMATS."""
    import gguf

    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        problem = f"a GGUF file can be made of {', '.join(ARCHITECTURES)} models, not of {model_type}"
        raise InvalidParameter("shape", problem)
    config = _with_defaults(config)
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[model_type])
    _add_shape(writer, config)
    _add_tokenizer(writer, config["vocab_size"])
    matrices = [(matrix, _kind_of(matrix, format, config["num_hidden_layers"])) for matrix in _matrices(config)]
    vectors = list(_vectors(config))
    for name, size in vectors:
        writer.add_tensor_info(name, (size,), np.dtype(np.float32), 4 * size)
    for (name, rows, columns), kind in matrices:
        size = columns // KINDS[kind].columns * KINDS[kind].num_bytes
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, (rows, size), np.dtype(np.uint8), rows * size, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, size in vectors:
        writer.write_tensor_data(np.ones(size, dtype=np.float32))
    for (name, rows, columns), kind in matrices:
        note(name)
        writer.write_tensor_data(random_blocks(KINDS[kind], rows, columns, random))
    writer.close()


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The config with what its file may leave out."""
    given = {name: value for name, value in config.items() if value is not None}
    lacking = [name for name in REQUIRED if name not in given]
    if lacking:
        raise InvalidParameter("shape", f"its config.json lacks {', '.join(lacking)}")
    theta = (given.get("rope_parameters") or {}).get("rope_theta", 10_000.0)
    heads = {"num_key_value_heads": given["num_attention_heads"]}
    return heads | {"rms_norm_eps": 1e-6, "rope_theta": theta, "max_position_embeddings": 2048} | given


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    """Copy the tokenizer of the default model, with unused tokens up to the size of the vocabulary."""
    for name, value in GGUFFile(resolve_model(DEFAULT_MODEL)).metadata.items():
        if not name.startswith("tokenizer."):
            continue
        if name == "tokenizer.ggml.tokens":
            if len(value) > vocab_size:
                problem = f"vocab_size ({vocab_size}) must not be below the {len(value)} tokens of the default model"
                raise InvalidParameter("shape", problem)
            value = [*value, *(f"<unused_{index}>" for index in range(len(value), vocab_size))]
        elif name == "tokenizer.ggml.token_type":
            value = [*value.tolist(), *[UNUSED] * (vocab_size - len(value))]
        add_field(writer, name, value)


def add_field(writer: Any, name: str, value: Any) -> None:
    """Add metadata with the usual type of such a value."""
    adds = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adds.get(type(value), writer.add_string)(name, value)


def _matrices(config: dict[str, Any]) -> Iterator[Matrix]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], _head_dim(config)
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "token_embd.weight", config["vocab_size"], hidden
    if not config.get("tie_word_embeddings"):
        yield "output.weight", config["vocab_size"], hidden
    for layer in range(config["num_hidden_layers"]):
        for name, rows, columns in (
            ("attn_q", queries, hidden),
            ("attn_k", keys, hidden),
            ("attn_v", keys, hidden),
            ("attn_output", hidden, queries),
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            yield f"blk.{layer}.{name}.weight", rows, columns


def _vectors(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    hidden, head_dim = config["hidden_size"], _head_dim(config)
    yield "output_norm.weight", hidden
    for layer in range(config["num_hidden_layers"]):
        yield f"blk.{layer}.attn_norm.weight", hidden
        yield f"blk.{layer}.ffn_norm.weight", hidden
        if config["model_type"] == "qwen3":
            yield f"blk.{layer}.attn_q_norm.weight", head_dim
            yield f"blk.{layer}.attn_k_norm.weight", head_dim
        if config["model_type"] == "qwen2":
            for name in "qkv":
                heads = config["num_attention_heads" if name == "q" else "num_key_value_heads"]
                yield f"blk.{layer}.attn_{name}.bias", heads * head_dim


def _kind_of(matrix: Matrix, format: str, layers: int) -> str:
    """The kind of a matrix. Mixed formats store more bits of the head, and of values and outputs of the feed-forward
    block in the first and last eighth of the layers and in every third between."""
    name, _, columns = matrix
    kind = format.upper()
    if format in MIXED:
        most, best = MIXED[format]
        kind = best if name == "output.weight" else most
        if name.endswith(("attn_v.weight", "ffn_down.weight")):
            layer = int(name.split(".")[1])
            ends = layer < layers // 8 or layer >= 7 * layers // 8
            kind = best if ends or (layer - layers // 8) % 3 == 2 else most
    if columns % KINDS[kind].columns:
        kind = SMALLER.get(kind, kind)
    if columns % KINDS[kind].columns:
        raise InvalidParameter("format", f"{name} has {columns} columns, which are no multiple of a block")
    return kind


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


Floats = NDArray[np.float32]
Bytes = NDArray[Any]  # uint8; numpy's types forget it in every operation on bits

SUPER = 256  # columns of a block with nested scales
OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def requantize(source: Path, kind: str, path: Path, note: Callable[[str], None]) -> None:
    """Write `source` to `path` with all matrices as `kind`, or a smaller block where their columns do not fit."""
    import gguf

    if source.suffix != ".gguf":
        raise InvalidParameter("model", f"{source} is not a GGUF file")
    file = GGUFFile(source)
    writer = gguf.GGUFWriter(path, file.metadata["general.architecture"])
    for name, value in file.metadata.items():
        if not name.startswith(OWN_FIELDS):
            add_field(writer, name, value.tolist() if isinstance(value, np.ndarray) else value)
    for tensor in file.tensors.values():
        note(f"{kind}: {tensor.name}")
        values = file.read(tensor)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            own = kind if tensor.shape[-1] % KINDS[kind].columns == 0 else SMALLER[kind]
            writer.add_tensor(tensor.name, encode(own, values), raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parse_kinds(text: str) -> list[str]:
    """ "all", or the names of types of blocks separated by commas."""
    names = list(KINDS) if text == "all" else [name.strip().upper() for name in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise InvalidParameter("block_types", f"there is no {name!r}; choose all, or from {', '.join(KINDS)}")
    return names


# ---- rows of weights to blocks --------------------------------------------------------------------------------------


def encode(kind: str, rows: Floats) -> Bytes:
    """rows [rows, columns] -> their blocks [rows, bytes]; columns must fill whole blocks."""
    if kind in _ENCODERS:
        blocks = rows.reshape(-1, KINDS[kind].columns).astype(np.float32)
        return _ENCODERS[kind](blocks).reshape(len(rows), -1)
    import gguf

    blocks_of_gguf: Bytes = gguf.quants.quantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind])
    return blocks_of_gguf


def _half(values: Floats) -> tuple[Bytes, Floats]:
    """[blocks] as the bytes of float16 [blocks, 2], and as what these stand for."""
    halves = values.astype(np.float16)
    return halves[:, None].view(np.uint8), halves.astype(np.float32)


def _ratio(values: Floats, steps: Floats) -> Floats:
    """values / steps, and 0 where a step is 0."""
    zeros = np.zeros(np.broadcast(values, steps).shape, np.float32)
    return np.divide(values, steps, out=zeros, where=steps != 0)


def _nibbles(numbers: Bytes) -> Bytes:
    """[blocks, groups, 2 n] -> [blocks, groups * n]: the first half of a group in the low bits, the rest high."""
    half = numbers.shape[2] // 2
    packed: Bytes = numbers[:, :, :half] | numbers[:, :, half:] << 4
    return packed.reshape(len(numbers), -1)


def _nearest_iq4(values: Floats) -> Bytes:
    levels = np.array(IQ4_VALUES, np.float32)
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.uint8)


def _iq4_nl(blocks: Floats) -> Bytes:
    scale, exact = _half(np.abs(blocks).max(axis=1) / -IQ4_VALUES[0])
    numbers = _nearest_iq4(_ratio(blocks, exact[:, None]))
    return np.concatenate([scale, _nibbles(numbers[:, None])], axis=1)


def _iq4_xs(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, SUPER // COLUMNS, COLUMNS)
    ideal = np.abs(groups).max(axis=2) / -IQ4_VALUES[0]
    factor, exact = _half(ideal.max(axis=1) / 31)
    scales = np.rint(_ratio(ideal, exact[:, None])).clip(0, 31)
    numbers = _nearest_iq4(_ratio(groups, (exact[:, None] * scales)[:, :, None]))
    codes = scales.astype(np.uint16) + 32
    low = (codes & 15).astype(np.uint8)
    high = np.bitwise_or.reduce((codes >> 4) << (2 * np.arange(8, dtype=np.uint16)), axis=1).astype(np.uint16)
    return np.concatenate(
        [factor, high[:, None].view(np.uint8), low[:, ::2] | low[:, 1::2] << 4, _nibbles(numbers)], axis=1
    )


def _q6_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    ideal = np.abs(groups).max(axis=2) / 31
    factor, exact = _half(ideal.max(axis=1) / 127)
    scales = np.rint(_ratio(ideal, exact[:, None])).clip(0, 127)
    steps = (exact[:, None] * scales)[:, :, None]
    numbers = (np.rint(_ratio(groups, steps)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, COLUMNS)
    low = numbers & 15
    lows = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    highs = np.bitwise_or.reduce((numbers >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    count = len(blocks)
    parts = [lows.reshape(count, -1), highs.reshape(count, -1), scales.astype(np.int8).view(np.uint8), factor]
    return np.concatenate(parts, axis=1)


def _k(bits: int) -> Callable[[Floats], Bytes]:
    """Q4_K and Q5_K: a scale and a minimum of six bits for each group."""

    def encode_blocks(blocks: Floats) -> Bytes:
        groups = blocks.reshape(-1, SUPER // COLUMNS, COLUMNS)
        lowest = np.maximum(0, -groups.min(axis=2))
        ideal = (groups.max(axis=2) + lowest) / (2**bits - 1)
        factor, exact = _half(ideal.max(axis=1) / 63)
        low_factor, low_exact = _half(lowest.max(axis=1) / 63)
        scales = np.rint(_ratio(ideal, exact[:, None])).clip(0, 63)
        lows = np.rint(_ratio(lowest, low_exact[:, None])).clip(0, 63)
        steps, shifts = (exact[:, None] * scales)[:, :, None], (low_exact[:, None] * lows)[:, :, None]
        numbers = np.rint(_ratio(groups + shifts, steps)).clip(0, 2**bits - 1).astype(np.uint8)
        parts = [factor, low_factor, _six_bits(scales.astype(np.uint8), lows.astype(np.uint8))]
        if bits == 5:
            parts.append(np.bitwise_or.reduce((numbers >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1))
        parts.append(_nibbles((numbers & 15).reshape(-1, 4, 2 * COLUMNS)))
        return np.concatenate(parts, axis=1)

    return encode_blocks


def _six_bits(scales: Bytes, lows: Bytes) -> Bytes:
    """Eight scales and eight minima in twelve bytes."""
    first, second = scales[:, :4] | scales[:, 4:] >> 4 << 6, lows[:, :4] | lows[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (lows[:, 4:] & 15) << 4], axis=1)


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q6_K": _q6_k,
    "Q4_K": _k(4),
    "Q5_K": _k(5),
}
