"""Writers of quantized checkpoints, each with the formula of its values in float64, after the published layouts.

A writer gets a weight [out, in] and returns the tensors of its module, and the values that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import write_tiny_checkpoint

Parts = dict[str, Tensor]
Writer = Callable[[np.ndarray, np.random.Generator], tuple[Parts, np.ndarray]]
GROUP = 32
NF4 = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0], dtype=np.float32,
)  # fmt: skip


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, n] -> int32 [rows, n * bits / 32]; `order`: the column in each place of a word, lowest bits first."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    out = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), dtype=np.uint32)
    for place, column in enumerate(order):
        out |= numbers[:, column::per_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32).copy())


def rounded(weight: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numbers [out, in], scales and zero points [out, groups]; scales are exact in float16 and bfloat16."""
    groups = weight.reshape(len(weight), -1, group)
    largest = 2**bits - 1
    low, high = groups.min(2), groups.max(2)
    scales = 2 * np.abs(groups).max(2) / largest if symmetric else (high - low) / largest
    scales = torch.from_numpy(scales).bfloat16().half().double().numpy()
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scales), 1, largest)
    numbers = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, largest)
    return numbers.reshape(weight.shape).astype(np.int64), scales, zeros.astype(np.int64)


def values(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The formula of all integer formats: (number - zero point) * scale, of the column's group."""
    return (numbers - zeros[:, groups]) * scales[:, groups]


def half(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).half()


def compressed_integers(bits: int, group: int | None, symmetric: bool) -> Writer:
    def write(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
        size = group or weight.shape[1]
        numbers, scales, zeros = rounded(weight, bits, size, symmetric)
        parts = {
            "weight_packed": words(numbers, bits),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return parts, values(numbers, scales, zeros, np.arange(weight.shape[1]) // size)

    return write


def scaled(dtype: torch.dtype, block: tuple[int, int], name: str, static: bool = False) -> Writer:
    """8-bit numbers with a scale per block; a block side of 0 spans the whole side."""

    def write(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
        rows, columns = (side or whole for side, whole in zip(block, weight.shape, strict=True))
        largest = 127 if dtype is torch.int8 else 448
        down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales = np.zeros((down, across), dtype=np.float32)
        numbers = torch.zeros(weight.shape, dtype=dtype)
        out = np.zeros(weight.shape)
        for i in range(down):
            for j in range(across):
                part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = np.abs(weight[part]).max() / largest
                levels = torch.from_numpy(weight[part] / scales[i, j])
                numbers[part] = (levels.round() if dtype is torch.int8 else levels.float()).to(dtype)
                out[part] = numbers[part].double().numpy() * np.float64(scales[i, j])
        parts = {"weight": numbers, name: torch.from_numpy(scales)}
        if block == (0, 0):
            parts[name] = parts[name].reshape(1)
        if static:
            parts["input_scale"] = torch.tensor([0.03])
        return parts, out

    return write


def modelopt(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """8-bit floats with a scale per tensor, and the scales of an 8-bit KV cache."""
    parts, out = scaled(FP8, (0, 0), "weight_scale", static=True)(weight, random)
    return parts | {"k_scale": torch.tensor([0.5])}, out


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e2m1(levels: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Levels [rows, columns] -> the nearest 4-bit floats, two in a byte (the lower half first), and their values."""
    codes = np.abs(levels[..., None] - E2M1).argmin(-1).astype(np.uint8)
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), E2M1[codes]


def nvfp4(names: tuple[str, str, str], *, divides: bool = False, columns: bool = False) -> Writer:
    """4-bit floats with an e4m3 scale per 16 columns, times a global one; `divides`: it is stored inverted; `columns`:
    and times a factor for each column."""

    def write(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
        factors = random.uniform(0.5, 2, weight.shape[1]).astype(np.float32) if columns else np.ones(1, np.float32)
        weight = weight / factors
        groups = np.abs(weight.reshape(len(weight), -1, 16)).max(2) / 6
        whole = np.float32(448 / groups.max()) if divides else np.float32(groups.max() / 448)
        inner = np.float64(1) / whole if divides else np.float64(whole)
        scales = torch.from_numpy((groups / inner).astype(np.float32)).clamp(2**-6, 448).to(FP8)
        wide = scales.double().numpy().repeat(16, 1) * inner
        codes, levels = e2m1(weight / wide)
        parts = {names[0]: codes, names[1]: scales, names[2]: torch.tensor([whole])}
        parts |= {"input_scale": torch.tensor(0.01)} | (
            {"pre_quant_scale": torch.from_numpy(factors)} if columns else {}
        )
        return parts, levels * wide * factors

    return write


def microscaled(dtype: torch.dtype | None, names: tuple[str, str] = ("weight", "weight_scale")) -> Writer:
    """Numbers with a power of two per 32 columns: 8-bit floats, or 4-bit ones without a dtype."""

    def write(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
        groups = np.abs(weight.reshape(len(weight), -1, 32)).max(2)
        exponents = np.floor(np.log2(groups)).astype(np.int64) - (8 if dtype else 2)
        wide = (2.0**exponents).repeat(32, 1)
        if dtype is None:
            numbers, levels = e2m1(weight / wide)
        else:
            numbers = torch.from_numpy((weight / wide).astype(np.float32)).clamp(-448, 448).to(dtype)
            levels = numbers.double().numpy()
        parts = {names[0]: numbers, names[1]: torch.from_numpy((exponents + 127).astype(np.uint8))}
        return parts, levels * wide

    return write


def blocks_with_axes(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """8-bit floats in blocks of 32x32, whose scales have axes of one within the blocks."""
    parts, out = scaled(FP8, (32, 32), "weight_scale")(weight, random)
    return parts | {"weight_scale": parts["weight_scale"][:, None, :, None]}, out


def in_turns(*writers: Writer) -> Writer:
    """The writers one after the other, so that layers differ."""
    turns = cycle(writers)
    return lambda weight, random: next(turns)(weight, random)


def awq(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
    numbers, scales, zeros = rounded(weight, 4, GROUP, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(numbers.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": half(scales.T.copy())}
    return parts, values(numbers, scales, zeros, np.arange(weight.shape[1]) // GROUP)


def gptq(bits: int, symmetric: bool, *, shift: int = 1, act_order: bool = False) -> Writer:
    def write(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
        groups = np.arange(weight.shape[1]) // GROUP
        if act_order:
            groups = random.permutation(groups)
        by_group = np.argsort(groups, kind="stable")
        sorted_numbers, scales, zeros = rounded(weight[:, by_group], bits, GROUP, symmetric)
        numbers = np.empty_like(sorted_numbers)
        numbers[:, by_group] = sorted_numbers
        parts = {
            "qweight": words(numbers, bits).T.contiguous(),
            "qzeros": words(zeros.T - shift, bits),
            "scales": half(scales.T.copy()),
            "g_idx": torch.from_numpy(groups).int(),
        }
        return parts, values(numbers, scales, zeros, groups)

    return write


def nf4(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """Blocks of 64 numbers; their largest magnitudes are rounded to 8 bits themselves, in blocks of 256."""
    blocks = weight.reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    offset = float(np.float32(largest.mean()))
    table = np.linspace(-1, 1, 256, dtype=np.float32)
    padded = np.zeros(-(-len(largest) // 256) * 256)
    padded[: len(largest)] = largest - offset
    nested = np.abs(padded.reshape(-1, 256)).max(1).astype(np.float32)
    shares = (padded.reshape(-1, 256) / nested[:, None]).reshape(-1)[: len(largest)]
    codes = np.abs(shares[:, None] - table[None]).argmin(1).astype(np.uint8)
    absmax = table[codes].astype(np.float64) * np.repeat(nested, 256)[: len(largest)] + offset
    numbers = np.abs((blocks / absmax[:, None])[..., None] - NF4).argmin(-1).astype(np.uint8)
    flat = numbers.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape),
             "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}  # fmt: skip
    parts = {
        "weight": torch.from_numpy(flat[:, 0] << 4 | flat[:, 1])[:, None].contiguous(),
        "weight.absmax": torch.from_numpy(codes),
        "weight.quant_map": torch.from_numpy(NF4.copy()),
        "weight.nested_absmax": torch.from_numpy(nested),
        "weight.nested_quant_map": torch.from_numpy(table),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (NF4[numbers].astype(np.float64) * absmax[:, None]).reshape(weight.shape)


def bnb_int8(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
    largest = np.abs(weight).max(1).astype(np.float32)
    numbers = np.round(weight / largest[:, None] * 127).astype(np.int8)
    parts = {"weight": torch.from_numpy(numbers), "SCB": torch.from_numpy(largest)}
    return parts, numbers.astype(np.float64) * largest[:, None] / 127


def compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@dataclass
class Scheme:
    config: dict[str, Any]
    write: Writer
    integers: bool = False  # it is read as 4-bit integers in groups
    skipped: tuple[str, ...] = field(default=("lm_head", "embed_tokens"))


FP8 = torch.float8_e4m3fn
NVFP4 = nvfp4(("weight", "weight_scale", "weight_scale_2"))
SCHEMES: dict[str, Scheme] = {
    "compressed int4": Scheme(
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
        compressed_integers(4, GROUP, True),
        integers=True,
    ),
    "compressed int4, zero points": Scheme(
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False, "group_size": GROUP}),
        compressed_integers(4, GROUP, False),
        integers=True,
        skipped=("lm_head", "embed_tokens", "layers.1.mlp.down_proj", "layers.0.self_attn.v_proj"),
    ),
    "compressed w8a16": Scheme(
        compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        compressed_integers(8, None, True),
    ),
    "compressed w8a8": Scheme(
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        scaled(torch.int8, (1, 0), "weight_scale"),
    ),
    "compressed fp8, dynamic": Scheme(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        scaled(FP8, (1, 0), "weight_scale"),
    ),
    "compressed fp8, static": Scheme(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        scaled(FP8, (0, 0), "weight_scale", static=True),
    ),
    "compressed fp8, blocks": Scheme(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "block_structure": [40, 40]}),
        scaled(FP8, (40, 40), "weight_scale"),
    ),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, integers=True),
    "gptq": Scheme({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, gptq(4, True), integers=True),
    "gptq, zero points": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}, gptq(4, False), integers=True
    ),
    "gptq, act-order": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq(4, False, act_order=True)
    ),
    "gptq v2, 8 bits": Scheme(
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        gptq(8, False, shift=0),
    ),
    "fp8 blocks": Scheme(
        {"quant_method": "fp8", "weight_block_size": [40, 40]}, scaled(FP8, (40, 40), "weight_scale_inv")
    ),
    "fp8 per tensor": Scheme({"quant_method": "fp8"}, scaled(FP8, (0, 0), "weight_scale", static=True)),
    "fp8 as MiniMax names it": Scheme(
        {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [40, 40]},
        scaled(FP8, (40, 40), "weight_scale_inv"),
    ),
    "modelopt": Scheme({"quant_method": "modelopt", "quant_algo": "FP8"}, modelopt),
    "modelopt, a scale per channel": Scheme(
        {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "producer": {"name": "modelopt"}},
        scaled(FP8, (1, 0), "weight_scale"),
    ),
    "modelopt, blocks": Scheme({"quant_algo": "FP8_PB_WO", "quant_method": "modelopt"}, blocks_with_axes),
    "modelopt nvfp4": Scheme({"quant_algo": "NVFP4", "quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, NVFP4),
    "modelopt nvfp4, factors of columns": Scheme(
        {"quant_algo": "NVFP4_AWQ"}, nvfp4(("weight", "weight_scale", "weight_scale_2"), columns=True)
    ),
    "modelopt mxfp8": Scheme({"quant_algo": "MXFP8", "quant_method": "modelopt"}, microscaled(FP8)),
    "modelopt, layers that differ": Scheme(
        {
            "quant_algo": "MIXED_PRECISION",
            "quant_method": "fp8",
            "quantized_layers": {
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.1.mlp": {"quant_algo": "MXFP8"},
            },
        },
        in_turns(NVFP4, modelopt, microscaled(FP8)),
    ),
    "quark mxfp4": Scheme(
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        microscaled(None),
    ),
    "quark fp8": Scheme(
        {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3", "qscheme": "per_channel"}]}},
        scaled(FP8, (1, 0), "weight_scale"),
    ),
    "fbgemm": Scheme(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, scaled(FP8, (1, 0), "weight_scale")
    ),
    "compressed nvfp4": Scheme(
        compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group"}),
        nvfp4(("weight_packed", "weight_scale", "weight_global_scale"), divides=True),
    ),
    "compressed mxfp4": Scheme(
        compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}),
        microscaled(None, ("weight_packed", "weight_scale")),
    ),
    "compressed mxfp8": Scheme(
        compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32}), microscaled(FP8)
    ),
    "auto-round as gptq": Scheme(
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_gptq"},
        gptq(4, True),
        integers=True,
    ),
    "bitsandbytes nf4": Scheme({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "bitsandbytes int8": Scheme({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
}


def write_quantized(folder: Path, scheme: Scheme) -> dict[str, Tensor]:
    """Write a tiny Llama in the scheme, and beside it, in `folder`-plain, its values; return the values."""
    write_tiny_checkpoint(folder)
    plain = write_tiny_checkpoint(folder.with_name(f"{folder.name}-plain"))
    tensors, random = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    stored, expected = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or any(part in module for part in scheme.skipped):
            stored[name] = expected[name] = tensor
            continue
        parts, found = scheme.write(tensor.double().numpy(), random)
        stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
        expected[name] = torch.from_numpy(found)
    save_file(stored, folder / "model.safetensors")
    save_file({name: each.float().contiguous() for name, each in expected.items()}, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": scheme.config}
    (folder / "config.json").write_text(json.dumps(config))
    return expected
