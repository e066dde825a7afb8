"""Building and loading the model classes of transformers, with our attention in place of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.models.families import FAMILIES
from chairlift.models.probe import AskedMask, CannotPlug
from chairlift.models.read_config import MAX_LAYERS

REGISTERED_NAME = "chairlift_ragged"
# What handles one layer's attention: (module, q, k, v, mask, further arguments) -> output, all in the layout
# of transformers: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out.
Handler = Callable[[Any, Tensor, Tensor, Tensor, Any, dict[str, Any]], Tensor]


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(REGISTERED_NAME, _attention)
    AttentionMaskInterface.register(REGISTERED_NAME, _mask)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    ragged_attention: Handler | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    if ragged_attention is None:
        raise CannotPlug("it does not pass keyword arguments on to its attention")
    return ragged_attention(module, query, key, value, attention_mask, further), None


def _mask(*, mask_function: Any, local_size: int | None = None, **kwargs: Any) -> AskedMask:
    return AskedMask(mask_function, local_size)


def read_transformers_config(config: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(model_type, "transformers has no causal language model of that name")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}  # weights come dequantized
    try:
        return CONFIG_MAPPING[model_type].from_dict(plain)
    except Exception as error:  # the checks of a hundred config classes
        raise CorruptCheckpoint(f"config.json: {error}") from error


def build_without_weights(hf_config: Any) -> Any:
    """The model without memory for its weights; raises if its kind is not supported."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    _register()
    model_type = hf_config.model_type
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if hf_config.is_encoder_decoder:
        raise refusal(model_type, "encoder-decoder models are not supported")
    if model_class._is_stateful:
        raise refusal(model_type, "it keeps a recurrent state, which cannot be paged")
    if not model_class._supports_attention_backend:
        raise refusal(model_type, "its attention in transformers cannot be replaced")
    if getattr(hf_config.get_text_config(), "num_hidden_layers", 0) > MAX_LAYERS:
        raise CorruptCheckpoint(f"config.json: more than {MAX_LAYERS} layers")
    # On the meta device routing has no values; this variant runs all experts alike.
    hf_config._experts_implementation = "batched_mm"
    try:
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=REGISTERED_NAME, trust_remote_code=False
            )
    except Exception as error:  # the constructors of a hundred model classes
        raise refusal(model_type, f"transformers cannot build it: {error!r}") from error
    return shell.eval()


def load_with_weights(hf_config: Any, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Any:
    """Load through transformers, which handles the names and layouts of older checkpoints."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    state = _collect(tensors, dtype)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    show_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        shell, report = model_class.from_pretrained(
            None,
            config=hf_config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=REGISTERED_NAME,
            experts_implementation="eager",
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
    return shell.eval()


def _collect(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in state:
            raise CorruptCheckpoint(f"tensor {name} is in the checkpoint more than once")
        state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return state


def refusal(model_type: str, reason: str) -> UnsupportedModel:
    families = ", ".join(family.title for family in FAMILIES.values())
    return UnsupportedModel(
        f"model type {model_type!r} cannot run: {reason}. Supported: {families}, and causal language models of "
        "transformers whose attention can be replaced."
    )
