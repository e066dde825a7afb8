"""A tiny random gpt-oss checkpoint as published ones look: MXFP4 experts, harmony's tokens and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file
from torch import Tensor

from tests.loading.gguf_writing import add_metadata, add_rope, add_tensor, finish
from tests.models.checkpoints import make_reference
from tests.tiny import byte_level_tokenizer

MARKS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
# What matters of the published template, in the same format.
TEMPLATE = """\
{{- "<|start|>system<|message|>Reasoning: " + (reasoning_effort or "medium") + "<|end|>" }}
{%- if tools %}{{- "<|start|>developer<|message|># Tools " + (tools | tojson) + "<|end|>" }}{% endif %}
{%- for message in messages %}
  {%- if message.role == "assistant" %}
    {%- if message.thinking and message.tool_calls %}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
    {%- endif %}
    {%- if message.tool_calls %}
      {%- set call = message.tool_calls[0].function %}
      {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
      {{- (call.arguments | tojson) + "<|call|>" }}
    {%- else %}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
  {%- elif message.role == "tool" %}
    {{- "<|start|>functions to=assistant<|channel|>commentary<|message|>" + message.content + "<|end|>" }}
  {%- else %}
    {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}
{%- if begin_analysis %}{{- "<|channel|>analysis<|message|>" }}{% endif %}"""


def value_of(code: int) -> float:
    """The value of a 4-bit float by its definition: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [..., out, in] -> blocks, scales, and the values that they stand for."""
    groups = weight.double().unflatten(-1, (-1, 32))
    powers = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-120, 120)
    table = torch.tensor([value_of(code) for code in range(16)], dtype=torch.float64)
    scaled = groups / 2 ** powers[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    pairs = codes.unflatten(-1, (-1, 2))
    blocks = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    values = (table[codes] * 2 ** powers[..., None]).flatten(-2)
    return blocks, (powers + 127).to(torch.uint8), values.float()


def write_gpt_oss(folder: Path) -> Any:
    """Write the checkpoint; returns the transformers model with the values that it stands for."""
    from transformers import GptOssConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(340, more_special=MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    config = GptOssConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=1.0,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        eos_token_id=ends[0],
    )
    reference = make_reference(config)
    tensors = {}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = parameter.clone()
                continue
            blocks, scales, values = quantized(parameter.mT)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.copy_(values.mT)
    save_file(tensors, folder / "model.safetensors")
    not_converted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": not_converted}
    written = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(written))
    return reference


def write_gguf(path: Path, reference: Any, tensors: dict[str, Tensor]) -> None:
    """Write the checkpoint as the usual converter does: gate and up apart, in GGUF's blocks of 17 bytes."""
    config = reference.config
    writer = GGUFWriter(path, "gpt-oss")
    add_metadata(writer, config.to_dict() | {"sliding_window": config.sliding_window})
    add_rope(writer, config.to_dict())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    for name, tensor in tensors.items():
        if name.endswith("_scales"):
            continue
        stem = name.removesuffix("_blocks").removesuffix("_bias").removesuffix(".weight").removesuffix(".bias")
        parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(stem.rpartition(".")[2], (stem.rpartition(".")[2],))
        suffix = "bias" if name.endswith("bias") else "weight"
        for index, part in enumerate(parts):
            stored = names.get_name(f"{stem.rpartition('.')[0]}.{part}".lstrip("."))
            assert stored is not None, name
            rows = slice(index, None, len(parts))
            if name.endswith("_blocks"):
                scales = tensors[f"{stem}_scales"][:, rows]
                _add_blocks(writer, f"{stored}.weight", tensor[:, rows], scales)
            else:
                values = tensor[:, rows] if len(parts) == 2 else tensor
                add_tensor(writer, f"{stored}.{suffix}", values.float().numpy(), GGMLQuantizationType.F32)
    finish(writer)


def _add_blocks(writer: Any, name: str, codes: Tensor, scales: Tensor) -> None:
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [..., 32]
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    blocks = torch.cat((scales[..., None], halves), dim=-1).flatten(-2)
    writer.add_tensor(name, blocks.numpy(), raw_dtype=GGMLQuantizationType.MXFP4)
