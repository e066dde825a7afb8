"""Models that hold a language model beside parts that read images or sound: the config and tensors of their text part.

Text alone gives the same positions in every direction, so that the multimodal rotations of such models are the usual
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from chairlift.errors import CorruptCheckpoint
from chairlift.models.families import find_family

# Where configs have the text part, by the class that wrote them.
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")
_VISION_SECTIONS = ("vision_config", "vision_tower_config", "vq_config")
_AUDIO_SECTIONS = ("audio_config", "audio_encoder_config", "speech_config")
# Parts of the names of fields that configs without such sections have.
_HINTS = {"vision": ("vision", "visual", "image", "img"), "audio": ("audio", "speech")}
_OMNI = "thinker_config"  # Models that also speak have it, as the part that reads and writes text.
_KINDS = {
    (): "multimodal model",
    ("vision",): "vision-language model",
    ("audio",): "audio-language model",
    ("vision", "audio"): "vision- and audio-language model",
}
_NOT_READ = dict(
    zip(_KINDS.values(), ("other inputs are", "images are", "sound is", "images and sound are"), strict=True)
)
# What a text part may leave out where transformers has a default for it.
_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_ALWAYS = tuple(name for name in _SIZES if name != "num_key_value_heads")  # usually they are as many as query heads

# Prefixes of the text model's tensor names, depending on the class that saved the checkpoint.
_LANGUAGE = ("language_model.", "text_model.", "language.")
HEAD = "lm_head.weight"
PREFIXES = ("model.", "thinker.", "backbone.", *_LANGUAGE)

Value = TypeVar("Value")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part; the config itself if there is nothing else."""
    outer = config[_OMNI] if isinstance(config.get(_OMNI), Mapping) else config
    outer_type = str(outer.get("model_type"))
    if find_family(outer_type) is not None:
        return outer
    section = next((name for name in _TEXT_SECTIONS if outer.get(name)), None)
    own_type = f"{outer_type}_text"
    if section is None:  # older configs have the fields of the text part beside the section of the images
        return dict(outer) | {"model_type": own_type} if find_family(own_type) is not None else outer
    inner = outer[section]
    if not isinstance(inner, Mapping):
        raise CorruptCheckpoint(f"config.json: {section} must be an object, got {inner!r:.100}")
    shared = {"eos_token_id": outer["eos_token_id"]} if outer.get("eos_token_id") is not None else {}
    inner = shared | {name: value for name, value in inner.items() if value is not None or name not in _SIZES}
    if outer.get("tie_word_embeddings") is not None:  # the whole model ties its head, whatever the default of its part
        inner["tie_word_embeddings"] = outer["tie_word_embeddings"]
    if inner.get("model_type") in (None, outer_type) and find_family(own_type) is not None:
        inner |= {"model_type": own_type}
    elif inner.get("model_type") is None and (named := _type_of_class(inner.get("architectures"))) is not None:
        inner |= {"model_type": named}
    return inner if all(name in inner for name in _ALWAYS) else _defaults(outer_type, inner) | inner


def _type_of_class(architectures: Any) -> str | None:
    """The model type whose language model in transformers is the class that wrote a text part."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = architectures[0] if isinstance(architectures, list) and architectures else None
    types = (model_type for model_type, one in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if one == name)
    return next(types, None)


def _defaults(outer_type: str, inner: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that transformers gives a text part whose config leaves them out."""
    from transformers import CONFIG_MAPPING

    known_type = next((name for name in (str(inner.get("model_type")), outer_type) if name in CONFIG_MAPPING), None)
    if known_type is None:
        return {}
    try:
        defaults = CONFIG_MAPPING[known_type]().get_text_config().to_dict()
    except Exception:  # some classes have no defaults; what is missing is named where it is read
        return {}
    if inner.get("num_attention_heads") is not None:
        defaults.pop("num_key_value_heads", None)  # There are as many as heads.
    return {name: defaults[name] for name in _SIZES if defaults.get(name) is not None}


def kind(config: Mapping[str, Any]) -> str | None:
    """What a model is beside a language model, in words; None if it reads text only."""
    outer = config[_OMNI] if isinstance(config.get(_OMNI), Mapping) else config
    sections = {"vision": _VISION_SECTIONS, "audio": _AUDIO_SECTIONS}
    read = tuple(name for name, keys in sections.items() if any(outer.get(key) for key in keys))
    return _KINDS[read or _hinted(outer)] if read or text_config(config) is not config else None


def hinted_kind(config: Mapping[str, Any]) -> str | None:
    """What a model of an unknown type seems to be beside a language model."""
    read = _hinted(config)
    return _KINDS[read] if read else None


def _hinted(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a model seems to read beside text, by the names of its fields."""
    return tuple(name for name, hints in _HINTS.items() if any(hint in key for key in config for hint in hints))


def text_part_notice(config: Mapping[str, Any]) -> str | None:
    """What a user should know about a model that also reads images or sound."""
    whole = kind(config)
    return None if whole is None else f"{whole}: its text part runs; {_NOT_READ[whole]} not read"


def canonical_name(name: str) -> str:
    """The name of a tensor without the prefixes that place the text model in a larger one."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


class TextPart:
    """Tells the tensors of a text part from those of other parts, by the names that the text model has."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: the canonical names of the text model's tensors."""
        self._first = {name.partition(".")[0] for name in (*names, HEAD)}  # The head counts even where it is tied.

    def has(self, full_name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to it, or has a name that claims so."""
        inside = full_name.removeprefix("thinker.").removeprefix("model.").startswith(_LANGUAGE)
        return inside or canonical_name(full_name).partition(".")[0] in self._first


def text_tensors(names: Iterable[str], tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """The tensors of a text part, under the names that the text model alone has."""
    alone = {canonical_name(name): name for name in names}
    prefixes = {name.partition(".")[0]: full.removesuffix(name) for name, full in alone.items()}
    part = TextPart(alone)
    for full_name, tensor in tensors:
        if part.has(full_name):
            name = canonical_name(full_name)
            yield prefixes.get(name.partition(".")[0], "") + name, tensor
