"""Random weights for a config, to measure speed, which depends on shapes and not on values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor

from chairlift.layers.expert_weights import ExpertRows
from chairlift.layers.parts import Targets
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.config_file import ConfigCheckpoint
from chairlift.loading.stored_weight import GROUP, GroupedIntegers, MicroscaledFloats, NamedWeights
from chairlift.models import is_native
from chairlift.text.tokenizer import Tokenizer

SPREAD = 0.02  # the usual standard deviation of fresh weights


class DummyCheckpoint(ConfigCheckpoint, Checkpoint):
    """Random weights for a config.json."""

    def __init__(self, path: str | Path, device: torch.device) -> None:
        super().__init__(path)
        self._device = device
        if self.has_4_bit_experts:
            self.quantization = "mxfp4"
        elif self.has_4_bit_layers:
            self.quantization = f"GPTQ, 4-bit integers in groups of {self.group_size}"

    def names(self) -> list[str]:
        return [name for name, _ in _targets(self.config)]

    def stored(self) -> NamedWeights:
        if self.has_4_bit_experts:
            return _with_4_bit_experts(self.config, self._device)
        if self.has_4_bit_layers:
            return _with_4_bit_layers(self.config, self._device, self.group_size)
        return dummy_tensors(self.config, self._device)


def dummy_tokenizer() -> Tokenizer:
    """A tokenizer for models without one: prompts are token ids, and every output is an empty text."""
    return Tokenizer(Backend(WordLevel({"<unknown>": 0}, unk_token="<unknown>")))


def dummy_tensors(config: Mapping[str, Any], device: torch.device, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """A tensor for every weight of the model that `config` describes, made on `device` one by one."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    for name, target in _targets(config):
        if len(target.shape) == 1:  # norms and biases
            yield name, torch.ones(target.shape, dtype=torch.bfloat16, device=device)
        else:
            values = torch.empty(target.shape, dtype=torch.bfloat16, device=device)
            yield name, values.normal_(0.0, SPREAD, generator=generator)


def _with_4_bit_experts(config: Mapping[str, Any], device: torch.device) -> NamedWeights:
    experts = {name for name, target in _targets(config) if isinstance(target, ExpertRows)}
    for name, tensor in dummy_tensors(config, device):
        if name not in experts:
            yield name, tensor
            continue
        groups = tensor.unflatten(-1, (-1, GROUP))
        codes = torch.randint(0, 256, (*groups.shape[:-1], GROUP // 2), dtype=torch.uint8, device=device)
        exponents = torch.full(groups.shape[:-1], 120, dtype=torch.uint8, device=device)  # values of up to 0.05
        yield name, MicroscaledFloats(codes, exponents)


def _with_4_bit_layers(config: Mapping[str, Any], device: torch.device, group: int) -> NamedWeights:
    for name, tensor in dummy_tensors(config, device):
        if not name.endswith("_proj.weight"):  # norms, embedding and head
            yield name, tensor
            continue
        rows, columns = tensor.shape
        numbers = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
        scales = torch.full((rows, columns // group), SPREAD / 4.6, dtype=torch.float16, device=device)
        yield name, GroupedIntegers(4, numbers, scales)  # 4.6: the standard deviation of numbers from -8 to 7


def _targets(config: Mapping[str, Any]) -> Targets:
    from chairlift.models.decoder import Decoder
    from chairlift.models.loader import targets
    from chairlift.models.read_config import decoder_config

    if not is_native(config):
        from chairlift.models.fallback.transformers_classes import checkpoint_tensors

        return checkpoint_tensors(config)
    return targets(Decoder(decoder_config(config), dtype=torch.bfloat16, device=torch.device("meta")))
