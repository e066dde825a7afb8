"""The part of a model that turns images into embeddings, by the modules of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import PromptPositions
from chairlift.core.images import PromptImage
from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.models.wrappers import text_config
from chairlift.vision.slices import SlicedWork, is_sliced, pause_before_products

_TEXT_PARTS = ("language_model", "text_model")
_TOWERS = ("vision_tower", "vision_model", "visual")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The embeddings of one image, and what is added to the residual stream behind the first layers."""

    rows: Tensor  # [n, hidden]
    deep: tuple[Tensor, ...] = ()  # [n, hidden] each


def whole_config(config: Mapping[str, Any]) -> Any:
    """The config of a whole model that reads images, as transformers reads it; raises UnsupportedModel if it has no
    such model."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UnsupportedModel(f"transformers has no model of type {model_type!r} that reads images")
    if text_config(config) is config:
        raise UnsupportedModel(f"model type {model_type!r} reads text only")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(plain))
    except Exception as error:  # the checks of a hundred config classes
        raise CorruptCheckpoint(f"config.json: {error}") from error


class VisionEncoder:
    """A vision tower and what projects its output to the size of the text model."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`tensors`: those of the checkpoint that are not of the text model, under their names there."""
        self.config = whole_config(config)
        self.dtype, self.device = dtype, device
        shell = _load(self.config, tensors, dtype).to(device).eval()
        # Gemma 4 lets the tokens of an image see each other only where attention has a window.
        self.mutual_in_windows_only = self.config.model_type != "gemma3"
        self._model = getattr(shell, "model", shell)
        if not hasattr(self._model, "get_image_features"):
            self._model = shell
        self.axes: Tensor | None = shell.rotary_axes  # [pairs]: the direction in which a pair is rotated by position
        self.num_bytes = sum(each.numel() * each.element_size() for each in shell.parameters())
        self.num_parameters = sum(each.numel() for each in shell.parameters())
        self.num_deep = len(getattr(getattr(self._model, "visual", None), "deepstack_merger_list", ()))
        self._weights = pause_before_products(shell.modules())
        for name in _TOWERS:
            tower = getattr(self._model, name, None)
            if tower is not None:
                _divide(tower)

    def encode(self, images: Sequence[PromptImage]) -> list[EncodedImage]:
        """Encode images, those of the same form together."""
        encoded: dict[int, EncodedImage] = {}
        for group in _alike(images):
            together = self._encode_alike([images[index] for index in group])
            encoded.update(zip(group, together, strict=True))
        return [encoded[index] for index in range(len(images))]

    def begin(self, image: PromptImage) -> SlicedWork[EncodedImage]:
        """Encode an image in slices."""
        pixels = image.data["pixel_values"]  # type: ignore[index]
        parts = int(np.prod(pixels.shape[:-3])) if pixels.ndim >= 4 else 1
        return SlicedWork(lambda: self._encode_alike([image])[0], self._weights * parts, torch.get_num_threads())

    def _encode_alike(self, images: Sequence[PromptImage]) -> list[EncodedImage]:
        counts = [image.rows for image in images]
        data = [image.data for image in images]
        inputs: dict[str, Tensor] = {}
        for name in data[0]:  # type: ignore[attr-defined]
            stacked = torch.from_numpy(np.concatenate([each[name] for each in data]))  # type: ignore[index]
            stacked = stacked.to(self.dtype) if stacked.is_floating_point() else stacked
            inputs[name] = stacked.to(self.device)
        output = self._model.get_image_features(**inputs, return_dict=True)
        rows = _rows_of(output.pooler_output)
        if len(rows) != sum(counts):
            raise RuntimeError(f"the vision model made {len(rows)} embeddings for {sum(counts)} tokens")
        deep = [_rows_of(each).split(counts) for each in getattr(output, "deepstack_features", None) or ()]
        return [
            EncodedImage(own.clone(), tuple(layer[index].clone() for layer in deep))
            for index, own in enumerate(rows.split(counts))
        ]

    def positions(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> PromptPositions | None:
        """Where the tokens of a prompt stand, for a model that places images in two dimensions; raises InvalidParameter
        for images without a token in between, which it could not tell apart."""
        if self.axes is None or not images:
            return None
        for before, image in pairwise(images):
            if before.end == image.start:
                raise InvalidParameter("images", "two have no token between them; the model's prompts have one")
        types = torch.zeros(1, len(tokens), dtype=torch.int64)
        for image in images:
            for start, end in image.spans:
                types[0, start:end] = 1
        grids = torch.from_numpy(np.concatenate([image.data["image_grid_thw"] for image in images]))  # type: ignore[index]
        ids, _ = self._model.get_rope_index(
            input_ids=torch.tensor([list(tokens)]), mm_token_type_ids=types, image_grid_thw=grids
        )
        places = ids[-3:, 0].to(torch.int64).numpy()
        return PromptPositions(places, int(places.max()) + 1 - len(tokens), self.axes.numpy())


def _rows_of(features: Any) -> Tensor:
    """Features of several images as rows, however the model returned them."""
    parts = features if isinstance(features, list | tuple) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _alike(images: Sequence[PromptImage]) -> list[list[int]]:
    """The images in groups whose inputs differ in their first dimension only."""
    groups: dict[Any, list[int]] = {}
    for index, image in enumerate(images):
        data: Mapping[str, np.ndarray] = image.data  # type: ignore[assignment]
        form = tuple((name, array.shape[1:]) for name, array in sorted(data.items()))
        groups.setdefault(form, []).append(index)
    return list(groups.values())


def count_weights(config: Mapping[str, Any]) -> int:
    """The weights of the vision part of a model, from its config alone."""
    whole = whole_config(config)
    try:
        with torch.device("meta"):
            shell = _without_text(type(whole))(whole)
    except Exception as error:  # the constructors of a hundred model classes
        raise UnsupportedModel(f"its vision part cannot be built: {error!r}") from error
    return sum(parameter.numel() for parameter in shell.parameters())


def _without_text(config_class: type) -> Any:
    """The class of transformers for a whole model, made without its text part."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]

    def without_text(self: Any, config: Any) -> None:
        whole.__init__(self, config)
        inner = getattr(self, "model", self)
        name = next(each for each in _TEXT_PARTS if hasattr(inner, each))
        self.rotary_axes = _rotary_axes(getattr(inner, name))
        setattr(inner, name, torch.nn.Identity())
        for owner in (self, inner):
            if hasattr(owner, "lm_head"):
                owner.lm_head = torch.nn.Identity()

    changes = {
        "__init__": without_text,
        "_tied_weights_keys": {},
        "tie_weights": lambda self, *args, **kwargs: None,
        "get_input_embeddings": lambda self: None,
        "get_output_embeddings": lambda self: None,
        "__module__": whole.__module__,
    }
    return type(whole.__name__, (whole,), changes)


def _load(config: Any, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Any:
    """The model of transformers without its text part, with its weights."""
    from transformers.utils import logging

    only_vision = _without_text(type(config))
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors}
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        shell, report = only_vision.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation="sdpa" if only_vision._supports_sdpa else "eager",
            output_loading_info=True,
            local_files_only=True,
        )
    except (RuntimeError, ValueError) as error:
        raise CorruptCheckpoint(f"the checkpoint's vision part does not fit its config.json: {error}") from error
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(sorted(str(name) for name in report[problem])[:5])
            raise CorruptCheckpoint(
                f"the checkpoint's vision part has {problem.removesuffix('_keys')} tensors: {names}"
            )
    return shell


def _rotary_axes(text_model: Any) -> Tensor | None:
    """The direction of each rotated pair, by the code that mixes the angles of three directions; None if there is but
    one direction."""
    rotary: Any = getattr(text_model, "rotary_emb", None)
    if not hasattr(rotary, "recomposition_frequencies") or not hasattr(rotary, "mrope_section"):
        return None
    pairs = rotary.inv_freq.shape[-1]
    directions = torch.arange(3, device="cpu").view(3, 1, 1, 1).expand(3, 1, 1, pairs)
    numbers = torch.arange(pairs, device="cpu").expand(3, 1, 1, pairs)
    mixed, order = (rotary.recomposition_frequencies(each.clone())[0, 0] for each in (directions, numbers))
    return torch.stack([mixed[order == number][0] for number in range(pairs)])


def _divide(tower: Any) -> None:
    """Let sliced work go through a vision tower one picture after the other, so that its slices are fine."""
    forward = tower.forward

    def divided(pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = len(pixel_values)
        if not is_sliced() or pixel_values.ndim != 4 or count == 1 or args:
            return forward(pixel_values, *args, **kwargs)
        parts = []
        for index in range(count):
            own = {
                name: value[index : index + 1] if isinstance(value, Tensor) and len(value) == count else value
                for name, value in kwargs.items()
            }
            parts.append(forward(pixel_values[index : index + 1], **own))
        return type(parts[0])(**{name: _joined([part[name] for part in parts]) for name in parts[0]})

    tower.forward = divided


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    if values[0] is None:
        return None
    return tuple(_joined(each) for each in zip(*values, strict=True))
