"""Running any causal language model of transformers on the ragged batch.

An application can register an attention and a mask function in transformers by name. The ones registered here only
pass on: the attention calls the handler of the forward pass that is running, and the mask function returns which mask
the model needs instead of building one. Classes with attention code of their own have an adapter.

Nothing about an architecture is assumed. Before weights are loaded, the model runs once on the meta device to record
the attention that it needs; after loading, a run checks that tokens influence each other only through the attention.
What cannot run is refused with the reason.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.recurrent import RecurrentLayer
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Linear
from chairlift.models.base import HiddenStates
from chairlift.models.fallback.adapters import AttentionAdapter
from chairlift.models.fallback.probe import VARYING_ROPES, AskedMask, AttentionRecorder, CannotPlug, rotate_by_values
from chairlift.models.fallback.transformers_classes import (
    PluggedModel,
    SeparateHead,
    build_without_weights,
    checkpoint_tensors,
    load_with_weights,
    read_transformers_config,
    refusal,
)
from chairlift.models.wrappers import text_config, text_tensors

log = logging.getLogger("chairlift")

MOST_FEW = 32  # rows of a step for which one thread is as fast as two that wait for ours
# What a model loses here, for the startup log.
NOTICE = (
    "that of transformers, with our attention: slower than a family of our own, and without fused layers, "
    "batch_invariant, draft heads, and fp8 or 4-bit weights"
)


@dataclass(frozen=True, slots=True)
class FallbackInfo:
    """What the run on the meta device shows about a model."""

    family: str
    vocab_size: int
    hidden_size: int
    max_len: int
    attention_layers: tuple[AttentionLayer, ...]
    num_parameters: int
    linear_shapes: tuple[tuple[int, int], ...]  # (out, in) of the linear maps that a weight format can store
    num_shared_parameters: int  # This many of them are in an embedding table, too.
    has_experts: bool
    recurrent_layers: tuple[RecurrentLayer, ...] = ()


def describe_fallback(config: Mapping[str, Any], max_len: int | None = None) -> FallbackInfo:
    info = _describe(json.dumps(config, sort_keys=True, default=str))
    if max_len is None:
        return info
    if not 1 <= max_len <= info.max_len:
        raise InvalidParameter("max_model_len", f"must be between 1 and the model's {info.max_len}, got {max_len}")
    return replace(info, max_len=max_len)


@lru_cache(maxsize=4)  # startup describes a model several times, and building it takes seconds
def _describe(config: str) -> FallbackInfo:
    hf_config = read_transformers_config(json.loads(config))
    plugged = build_without_weights(hf_config)
    num_parameters = sum(parameter.numel() for parameter in plugged.shell.parameters())
    tables = embedding_tables(plugged.shell)
    maps = [module for _, _, module in linear_maps(plugged.shell)]
    num_shared_parameters = sum(module.weight.numel() for module in maps if id(module.weight) in tables)
    experts = has_experts(plugged.shell)
    rotate_by_values(plugged.shell)
    recorder = AttentionRecorder()
    tokens = torch.zeros(3, dtype=torch.int64, device="meta")
    try:
        hidden = plugged.hidden_states(tokens, tokens, recorder)
        logits = SeparateHead(plugged.shell)(hidden)
        text_config = hf_config.get_text_config()
        layers = recorder.layers(text_config.num_hidden_layers)
    except CannotPlug as problem:
        raise refusal(hf_config.model_type, str(problem)) from None
    except Exception as error:  # anything that an architecture may raise
        if not plugged.follows_interface:
            raise refusal(hf_config.model_type, "its attention in transformers cannot be replaced") from error
        if AskedMask.__name__ in str(error):
            raise refusal(hf_config.model_type, "it computes its attention mask from values") from error
        if "meta" in str(error):  # Torch says so of tensors without values.
            reason = "its forward pass depends on values, such as the experts of a token"
            raise refusal(hf_config.model_type, reason) from error
        raise refusal(hf_config.model_type, f"its forward pass failed without weights: {error!r}") from error
    return FallbackInfo(
        family=hf_config.model_type,
        vocab_size=logits.shape[-1],
        hidden_size=hidden.shape[-1],
        max_len=_max_len(text_config, plugged.adapter),
        attention_layers=layers,
        num_parameters=num_parameters,
        linear_shapes=tuple(sorted(map(linear_shape, maps))),
        num_shared_parameters=num_shared_parameters,
        has_experts=experts,
    )


def fallback_obstacles(config: Mapping[str, Any], format: type[WeightFormat], device: str) -> list[str]:
    """Why a model on transformers' code cannot have weights in this format; empty if it can."""
    if format is PlainWeight:
        return []
    if device != "cpu" or format.name == "checkpoint":
        return ["this model runs on transformers' code, where weights are only rounded on a CPU"]
    return ["this model has experts"] if describe_fallback(config).has_experts else []


def load_fallback(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int | None = None,
    format: type[WeightFormat] = PlainWeight,
) -> TransformersModel:
    """Like `build_model`; the tensors of the stream become the model's own where no conversion is needed."""
    info = describe_fallback(config, max_len)
    if text_config(config) is not config:
        tensors = text_tensors((name for name, _ in checkpoint_tensors(config)), tensors)
    plugged = load_with_weights(read_transformers_config(config), tensors, dtype, device)
    if format is not PlainWeight:
        convert_linears(plugged.shell, format)
    plugged.shell.to(device)
    model = TransformersModel(plugged, info, dtype=dtype, device=device, format=format)
    _require_isolated_tokens(model, info)
    if device.type == "cuda" and not can_be_captured(model):
        model.allows_capture = False
        log.info("graphs     none: the forward pass of transformers waits for the device, so steps are not captured")
    return model


class TransformersModel:
    """A transformers model behind the interface of the engine."""

    def __init__(
        self,
        plugged: PluggedModel,
        info: FallbackInfo,
        *,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat] = PlainWeight,
    ) -> None:
        self.vocab_size = info.vocab_size
        self.hidden_size = info.hidden_size
        self.max_len = info.max_len
        self.attention_layers = info.attention_layers
        self.recurrent_layers = info.recurrent_layers
        self.dtype, self.kv_dtype = dtype, format.traits.kv_dtype or dtype
        self.quantization = format.name
        # Else the linear maps run on torch's threads.
        self.has_own_threads = format.traits.tile_type is not None or format.traits.becomes_blocks(dtype, device)
        self.allows_capture = True  # CUDA graphs may capture it.
        self.device = device
        self._weight_bytes = num_weight_bytes(plugged.shell)
        self._plugged = plugged
        self._head = SeparateHead(plugged.shell)

    def hidden_states(self, batch: StepBatch, attention: StepAttention, rows: Tensor | None = None) -> HiddenStates:
        assert batch.recurrent is None, "models with recurrent layers do not run by the fallback"
        assert batch.embeddings is None, "models that run by the fallback read tokens only"
        layers = self.attention_layers

        def handler(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, further: dict[str, Any]) -> Tensor:
            layer, value_dim, sinks = layers[module.layer_idx], v.shape[-1], further.get("s_aux")
            # Heads are padded with zeros, which change no attention: the cache has keys and values of one size.
            q, k, v = (
                each if each.shape[-1] == layer.head_dim else F.pad(each, (0, layer.head_dim - each.shape[-1]))
                for each in (states[0].transpose(0, 1) for states in (q, k, v))
            )
            output = attention.attend(layer, q, k, v, sinks=None if sinks is None else sinks.float())
            return output[None, ..., :value_dim].contiguous()

        with _one_thread_for_few(batch.tokens):
            hidden = self._plugged.hidden_states(batch.tokens, batch.positions, handler)
        return HiddenStates(hidden if rows is None else hidden.index_select(0, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        with _one_thread_for_few(hidden):
            return self._head(hidden)

    def num_mapped_bytes(self) -> int:
        return 0

    def num_weight_bytes(self) -> int:
        return self._weight_bytes


@contextmanager
def _one_thread_for_few(rows: Tensor) -> Iterator[None]:
    """Let torch use one thread for small steps on a CPU.

    Its threads spin after each operation, on the cores that the threads of our attention wait for: on 2 cores, decode
    steps of a model of 124M weights took seven times as long with two threads.
    """
    before = torch.get_num_threads()
    if rows.device.type != "cpu" or len(rows) > MOST_FEW or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _max_len(text_config: Any, adapter: AttentionAdapter | None) -> int:
    fields = ("max_position_embeddings", *(adapter.length_fields if adapter else ()))
    stated = (getattr(text_config, field, None) for field in fields)
    limit = next((length for length in stated if length is not None), adapter.default_length if adapter else None)
    if limit is None:
        raise UnsupportedModel("config.json: max_position_embeddings is missing")
    rope = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, Mapping)]
    for parameters in by_layer_type or [rope]:
        if parameters.get("rope_type") in VARYING_ROPES:  # No sequence may be longer.
            limit = min(limit, parameters.get("original_max_position_embeddings", limit))
    return int(limit)


class _NoNeighbours(StepAttention):
    """Stands in for the attention where no token may see another one."""

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        return v.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)


@torch.inference_mode()
def can_be_captured(model: TransformersModel) -> bool:
    """Whether a CUDA graph can capture the forward pass, found out by trying: some read values back to the host."""
    rows = torch.arange(4, device=model.device)
    stream = torch.cuda.current_stream()
    model.logits(model.hidden_states(StepBatch(rows, rows), _NoNeighbours()).last)  # what is made on first use
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model.logits(model.hidden_states(StepBatch(rows, rows), _NoNeighbours()).last)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_stream(stream)  # torch does not restore it if a capture fails at its end
    return True


@torch.inference_mode()
def _require_isolated_tokens(model: TransformersModel, info: FallbackInfo) -> None:
    """Check that without attention a token's result does not depend on its neighbours or its row.

    This finds convolutions, recurrences, and positions that are counted by row instead of read from the input.
    """

    def run(tokens: list[int], positions: list[int]) -> Tensor:
        rows = torch.tensor(tokens, device=model.device) % model.vocab_size
        where = torch.tensor(positions, device=model.device) % model.max_len
        return model.hidden_states(StepBatch(rows, where), _NoNeighbours()).last.float()

    forward = run([5, 6, 7, 8, 9], [0, 3, 1, 4, 2])[1:]
    backward = run([9, 8, 7, 6, 5], [2, 4, 1, 3, 1])[:-1].flip(0)
    # The median, because rounding may route one token of a mixture of experts differently.
    error = ((forward - backward).norm(dim=1) / forward.norm(dim=1)).median()
    if not error < (0.05 if model.dtype in (torch.bfloat16, torch.float16) else 1e-3):
        raise refusal(info.family, "its tokens influence each other outside the attention")


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
            shared = id(module.weight) in tables
            weight = module.weight.data if isinstance(module, nn.Linear) else module.weight.data.T.contiguous()
            linear = Linear(weight, None if module.bias is None else module.bias.data, format=format, shared=shared)
            if not shared:
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # releases the plain weight
            del weight
            linear.finalize()
            converted[id(module)] = FormattedLinear(linear)
        setattr(parent, name, converted[id(module)])
