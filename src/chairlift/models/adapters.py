"""Fits an adapter to a decoder: which products its modules are parts of, and its matrices as the products' terms."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.kernels.adapter_table import MAX_PARTS
from chairlift.layers.adapters import PackedAdapter, PartTerm, ProductTerms
from chairlift.layers.linear import Linear
from chairlift.loading.adapter_file import AdapterFile
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.models.loader import decoder_name, targets


@dataclass(frozen=True, slots=True)
class Module:
    """Where a linear map of a checkpoint is in the decoder: some rows of one of its products."""

    product: int
    target: Any  # the target of its weight, which knows the rows and their order
    out_features: int
    in_features: int
    heads: int = 0  # those of queries and keys


class AdapterFitting:
    """The modules of a decoder that can be adapted, by the names of its checkpoint."""

    @torch.inference_mode()
    def __init__(self, model: Decoder) -> None:
        self._modules: dict[str, Module] = {}
        self._padded = model.adapters.padded
        numbers = {id(linear.weight): number for number, linear in enumerate(_products(model))}
        self._others: set[str] = set()  # modules that have a weight but are no product of their own
        for name, target in targets(model):
            module, _, kind = name.rpartition(".")
            if kind != "weight":
                continue
            place = getattr(target, "placed", None)
            placed = None if place is None else place(torch.arange(target.shape[0]))
            number = None if placed is None else numbers.get(id(placed[0]))
            if number is None:
                self._others.add(module)
            else:
                out_features, in_features = target.shape
                heads = _heads(model, module)
                self._modules[module] = Module(number, target, out_features, in_features, heads)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """The modules that can be adapted, each with its output and input features."""
        return {name: (module.out_features, module.in_features) for name, module in self._modules.items()}

    def check(self, file: AdapterFile) -> None:
        """Raise, naming the module, if the adapter does not fit."""
        counts: dict[int, int] = defaultdict(int)
        for full_name, shape in file.shapes.items():
            module = self._module(full_name, file)
            if (shape.out_features, shape.in_features) != (module.out_features, module.in_features):
                have, wanted = [shape.out_features, shape.in_features], [module.out_features, module.in_features]
                raise UnsupportedModel(f"{file.path}: {full_name} adapts {have}, but the model has {wanted} there")
            counts[module.product] += 1
        if max(counts.values()) > MAX_PARTS:
            raise UnsupportedModel(f"{file.path}: adapts more than {MAX_PARTS} parts of one product")

    def num_numbers(self, file: AdapterFile) -> int:
        """How many numbers an adapter that fits has in memory at most: on a CPU, ranks and channels are filled up."""
        ranks: dict[int, int] = defaultdict(int)
        second, inputs = 0, {}
        for full_name, shape in file.shapes.items():
            product = self._module(full_name, file).product
            ranks[product] += shape.rank
            inputs[product] = shape.in_features
            second += shape.rank * self._padded(shape.out_features)
        return second + sum(self._padded(rank) * inputs[product] for product, rank in ranks.items())

    def pack(self, file: AdapterFile) -> PackedAdapter:
        """Read the numbers of an adapter that fits."""
        parts: dict[int, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
        heads = {name: self._module(name, file).heads for name in file.shapes}
        for full_name, (a, b, scale) in file.products(heads):
            module = self._module(full_name, file)
            _, first, placed = module.target.placed(b.float() * scale)
            parts[module.product].append((first, a.float(), placed.mT))
        return {
            product: ProductTerms(
                torch.cat([a for _, a, _ in sorted(own, key=lambda part: part[0])]),
                [PartTerm(first, b) for first, _, b in sorted(own, key=lambda part: part[0])],
            )
            for product, own in parts.items()
        }

    def _module(self, full_name: str, file: AdapterFile) -> Module:
        name = decoder_name(f"{full_name}.weight").removesuffix(".weight")
        if name in self._modules:
            return self._modules[name]
        if name in ("embed_tokens", "lm_head") or name in self._others:
            problem = "which cannot have adapters here: only linear maps of layers can, without routers and experts"
            raise UnsupportedModel(f"{file.path}: adapts {full_name}, {problem}")
        raise UnsupportedModel(f"{file.path}: adapts {full_name:.200}, which the model does not have")


def adapters_obstacle(model: CausalLM) -> str | None:
    """Why a model cannot have adapters; None if it can."""
    return None if isinstance(model, Decoder) else "the model runs on the code of transformers"


def attach_adapters(model: Decoder, max_slots: int) -> AdapterFitting:
    """Prepare a loaded decoder for adapters."""
    if not model.adapters.is_attached:
        model.adapters.attach(_products(model), model.device, model.dtype, max_slots)
    return AdapterFitting(model)


def _products(model: Decoder) -> list[Linear]:
    """The linear maps of all layers that may have adapters; routers choose experts and stay those of the model."""
    routers = {id(layer.mixture.router.linear) for layer in model.layers if layer.mixture is not None}
    return [linear for layer in model.layers for linear in layer.linears() if id(linear) not in routers]


def _heads(model: Decoder, module: str) -> int:
    words = module.split(".")
    attention = model.layers[int(words[1])].self_attention if words[0] == "layers" else None
    if attention is None:
        return 0
    return attention.layer.num_heads if words[-1] == "q_proj" else attention.layer.num_kv_heads
