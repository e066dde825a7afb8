"""The linear maps of a transformers model, in our weight formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.linear import Linear

MIN_FEATURES = 64  # smaller maps are gates and mixing weights: they take no time, and their rounding would show


class FormattedLinear(nn.Module):
    """A linear map of ours in the place of one of torch."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def linear_maps(shell: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    """The linear maps that a format can store: (the module that holds it, its name there, itself)."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(shell.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, (nn.Linear, Conv1D)) and min(module.weight.shape) >= MIN_FEATURES:
                yield parent, name, module


def linear_shape(module: Any) -> tuple[int, int]:
    """(out, in) of a linear map; GPT-2's have their weights transposed."""
    first, second = module.weight.shape
    return (first, second) if isinstance(module, nn.Linear) else (second, first)


def embedding_tables(shell: Any) -> set[int]:
    """The identities of the embedding tables, one of which may also be the head's weight."""
    return {id(module.weight) for module in shell.modules() if isinstance(module, nn.Embedding)}


def has_experts(shell: Any) -> bool:
    """Whether the model has experts, whose weights transformers stacks into tensors of three dimensions."""
    return any(parameter.ndim == 3 for parameter in shell.parameters())


def num_weight_bytes(shell: Any) -> int:
    """The bytes of all weights, plain or in a format; shared ones count once."""
    formatted = sum(module.linear.num_bytes for module in shell.modules() if isinstance(module, FormattedLinear))
    return int(sum(parameter.nbytes for parameter in shell.parameters())) + formatted


def convert_linears(shell: Any, format: type[WeightFormat]) -> None:
    """Store the linear maps in a format, one after the other."""
    tables = embedding_tables(shell)
    converted: dict[int, FormattedLinear] = {}
    for parent, name, module in linear_maps(shell):
        if id(module) not in converted:
            converted[id(module)] = _convert(module, format, shared=id(module.weight) in tables)
        setattr(parent, name, converted[id(module)])


def _convert(module: Any, format: type[WeightFormat], *, shared: bool) -> FormattedLinear:
    weight = module.weight.data if isinstance(module, nn.Linear) else module.weight.data.T.contiguous()
    bias = None if module.bias is None else module.bias.data
    linear = Linear(weight, bias, format=format, shared=shared)
    if not shared:
        module.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # releases the plain weight
    del weight
    linear.finalize()
    return FormattedLinear(linear)
