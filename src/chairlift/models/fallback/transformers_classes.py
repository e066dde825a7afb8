"""Building and loading the model classes of transformers, with our attention in place of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.config_file import decode_special_floats
from chairlift.models.fallback.adapters import AttentionAdapter, find_adapter
from chairlift.models.fallback.probe import AskedMask, CannotPlug, Handler
from chairlift.models.families import FAMILIES
from chairlift.models.fields import MAX_LAYERS
from chairlift.models.wrappers import text_config

REGISTERED_NAME = "chairlift_ragged"
ADAPTED_NAME = "chairlift_adapted"  # Models with an adapter, which does not read the mask, have it.
# What computes the attention of the forward pass that is running. Not passed as an argument, because not every model
# class passes keyword arguments on to its attention.
_handler: ContextVar[Handler] = ContextVar("handler")


def register_attention() -> None:
    """Register our attention and masks in transformers by name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **further: Any
    ) -> tuple[Tensor, None]:
        return _handler.get()(module, query, key, value, attention_mask, further), None

    def mask(*, mask_function: Any, local_size: int | None = None, **further: Any) -> AskedMask:
        return AskedMask(mask_function, local_size)

    AttentionInterface.register(REGISTERED_NAME, attention)
    AttentionMaskInterface.register(REGISTERED_NAME, mask)
    AttentionMaskInterface.register(ADAPTED_NAME, lambda **further: torch.empty(0))


@dataclass(frozen=True, slots=True)
class PluggedModel:
    """A model class with its layers, and the adapter that replaced its attention, if it has one."""

    shell: Any
    backbone: Any
    adapter: AttentionAdapter | None

    @property
    def follows_interface(self) -> bool:
        """Whether its class is said to use the attention that is registered in transformers, or has an adapter."""
        return self.adapter is not None or bool(self.shell._supports_attention_backend)

    def hidden_states(self, tokens: Tensor, positions: Tensor, handler: Handler) -> Tensor:
        """Run the layers on tokens, positions [T] -> [T, hidden]; `handler` computes the attention."""
        further: dict[str, Any] = {}
        if self.adapter is None or self.adapter.takes_positions:
            further["position_ids"] = positions[None]
        if self.adapter is not None:
            self.adapter.positions, self.adapter.handler = positions, handler
        token = _handler.set(handler)
        try:
            output = self.backbone(
                input_ids=tokens[None],
                # No token is padding. Given explicitly, or transformers looks for sequence boundaries in the positions.
                attention_mask=torch.ones(1, len(tokens), dtype=torch.bool, device=tokens.device),
                use_cache=False,
                **further,
            )
        finally:
            _handler.reset(token)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


class SeparateHead:
    """Everything after the final norm: the head, and whatever scaling or capping the model's class adds.

    The class runs with its backbone replaced by one that returns the hidden states it is given.
    """

    def __init__(self, shell: Any) -> None:
        prefix = shell.base_model_prefix
        if shell.base_model is shell or not hasattr(shell, prefix):
            raise CannotPlug("its head cannot be separated from its layers")
        setattr(shell, prefix, _HandBack())
        self._shell = shell

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._shell(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()


class _HandBack(torch.nn.Module):
    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _HiddenOnly:
        return _HiddenOnly((inputs_embeds,))

    @property
    def decoder(self) -> _HandBack:
        """Some classes (OPT) call a part of their backbone instead of the whole."""
        return self


class _HiddenOnly(tuple[Tensor]):
    """A model output with hidden states and nothing else, in both styles of access."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


# Fields that only configs of sparse attention have: a small network chooses the keys that a token attends to.
SPARSE_FIELDS = ("index_topk", "index_topk_blocks")
RECURRENT_LAYERS = {"linear_attention", "conv", "recurrent", "mamba"}  # `layer_types` names them so.


def read_transformers_config(config: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config = text_config(config)
    if "model_type" not in config:
        raise UnsupportedModel("config.json names no model_type")
    model_type = str(config["model_type"])
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(model_type, "transformers has no causal language model of that name")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}  # weights come dequantized
    try:
        return CONFIG_MAPPING[model_type].from_dict(decode_special_floats(plain))
    except Exception as error:  # the checks of a hundred config classes
        raise CorruptCheckpoint(f"config.json: {error}") from error


def build_without_weights(hf_config: Any) -> PluggedModel:
    """The model without memory for its weights; raises if its kind is not supported."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    register_attention()
    model_type = hf_config.model_type
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    _require_supported_kind(hf_config, model_class)
    # On the meta device routing has no values; this variant runs all experts alike.
    hf_config._experts_implementation = "batched_mm"
    try:
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=_first_implementation(model_class), trust_remote_code=False
            )
    except Exception as error:  # the constructors of a hundred model classes
        raise refusal(model_type, f"transformers cannot build it: {error!r}") from error
    return _plug(shell.eval())


def _require_supported_kind(hf_config: Any, model_class: Any) -> None:
    text_config = hf_config.get_text_config()
    if hf_config.is_encoder_decoder:
        raise refusal(hf_config.model_type, "encoder-decoder models are not supported")
    for field in SPARSE_FIELDS:
        if getattr(text_config, field, None) is not None:
            raise refusal(
                hf_config.model_type,
                f"it chooses keys by sparse attention ({field}) of another kind than DeepSeek V3.2 and GLM-5",
            )
    if model_class._is_stateful or RECURRENT_LAYERS.intersection(getattr(text_config, "layer_types", None) or ()):
        raise refusal(hf_config.model_type, "it keeps a recurrent state, which only our own layers can keep in slots")
    if getattr(text_config, "num_hidden_layers", 0) > MAX_LAYERS:
        raise CorruptCheckpoint(f"config.json: more than {MAX_LAYERS} layers")


def checkpoint_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name, without memory; a tied one is not repeated."""
    shell = build_without_weights(read_transformers_config(config)).shell
    own = dict(shell.named_parameters())
    everything = dict(shell.named_parameters(remove_duplicate=False))
    for name, tensor in shell.state_dict().items():
        if name in own or name not in everything:  # a parameter, or a buffer that checkpoints hold
            yield name, tensor


def load_with_weights(
    hf_config: Any, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device
) -> PluggedModel:
    """Load through transformers, which handles the names and layouts of older checkpoints."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    state: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in state:
            raise CorruptCheckpoint(f"tensor {name} is in the checkpoint more than once")
        state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    show_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        shell, report = model_class.from_pretrained(
            None,
            config=hf_config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=_first_implementation(model_class),
            experts_implementation=_experts_implementation(dtype, device),
            output_loading_info=True,
            local_files_only=True,
        )
    except (RuntimeError, ValueError) as error:
        raise CorruptCheckpoint(f"the checkpoint does not fit its config.json: {error}") from error
    finally:
        if show_progress:
            logging.enable_progress_bar()
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(sorted(str(name) for name in report[problem])[:5])
            raise CorruptCheckpoint(f"the checkpoint has {problem.replace('_keys', '')} tensors: {names}")
    return _plug(shell.eval())


def _first_implementation(model_class: Any) -> str:
    """The attention that a class is built with: ours, unless it only knows its own ones by name."""
    return REGISTERED_NAME if model_class._supports_attention_backend else "eager"


def _experts_implementation(dtype: torch.dtype, device: torch.device) -> str | None:
    """How transformers computes experts: one after the other, or by its own choice on a GPU, where a loop over them
    would wait for the device and could not be captured."""
    return None if device.type == "cuda" and dtype is torch.bfloat16 else "eager"


def _plug(shell: Any) -> PluggedModel:
    """Put our attention in the place of the model's: by an adapter, or by the interface of transformers."""
    adapter = find_adapter(shell.config.model_type)
    if adapter is not None:
        adapter.attach(shell)
    shell.config._attn_implementation = REGISTERED_NAME if adapter is None else ADAPTED_NAME
    return PluggedModel(shell, shell.base_model, adapter)


def refusal(model_type: str, reason: str) -> UnsupportedModel:
    families = ", ".join(family.title for family in FAMILIES.values())
    return UnsupportedModel(
        f"model type {model_type!r} cannot run: {reason}. Supported: {families}, and causal language models of "
        "transformers whose attention can be replaced."
    )
