"""What a checkpoint says about embeddings: how hidden states are pooled, and whether it is a reranker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chairlift.core.sampling.params import PoolingKind
from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.config_file import ConfigCheckpoint, read_json, read_json_object, read_optional_json_object

# Encoders of which the config says so: their attention is in both directions.
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert")
_KINDS = {
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
    "mean": PoolingKind.MEAN,
    "lasttoken": PoolingKind.LAST,
    "pooling_mode_cls_token": PoolingKind.CLS,
    "cls": PoolingKind.CLS,
}
_GGUF_KINDS = {0: PoolingKind.MEAN, 1: PoolingKind.MEAN, 3: PoolingKind.LAST}  # llama.cpp numbers them so; 0: none


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """The checkpoint's defaults; a model that was not made for embeddings takes the mean."""

    kind: PoolingKind = PoolingKind.MEAN
    answers: tuple[str, str] | None = None  # A reranker's mean "not relevant" and "relevant".
    problem: str | None = None  # why this checkpoint has no embeddings
    generates: bool = True  # False for a checkpoint without a language-model head
    labels: int | None = None  # the labels of a classifier's head
    raw_scores: bool = False  # the number of a single label is the score; else the score is its sigmoid
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts in front of inputs, by name
    prompt: str | None = None  # the name of the one that is used by default

    def prompted(self, text: str, name: str | None) -> str:
        """The text behind the prompt of this name, or behind the checkpoint's default one."""
        name = self.prompt if name is None else name
        if name is None:
            return text
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InvalidParameter("prompt_name", f"this model has no prompt {name!r:.60}; it has {known}")
        return self.prompts[name] + text

    def require(self) -> None:
        """Raise if the checkpoint's embeddings cannot be computed."""
        if self.problem is not None:
            raise UnsupportedModel(self.problem)


def read_embedding_config(checkpoint: Checkpoint | ConfigCheckpoint) -> EmbeddingConfig:
    """Read the files of sentence-transformers or the metadata of a GGUF file, and `classifier_from_token`."""
    config = checkpoint.config
    pooling = _read_pooling(checkpoint, _answers(config.get("classifier_from_token")))
    labels = num_labels(config) if is_encoder(config) else None
    generates = not (is_encoder(config) or lacks_head(config.get("architectures")))
    return replace(
        pooling, generates=generates, labels=labels, raw_scores=_has_raw_scores(config), **_prompts(checkpoint)
    )


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether it is an encoder, with or without a head, and not a decoder of that family."""
    names = config.get("architectures")
    generates = any(
        str(name).endswith(("LMHeadModel", "ForCausalLM")) for name in (names if isinstance(names, list) else ())
    )
    return config.get("model_type") in ENCODERS and not (generates or config.get("is_decoder"))


def num_labels(config: Mapping[str, Any]) -> int | None:
    """The labels of a head that classifies texts; None if there is no such head."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not name.endswith("ForSequenceClassification"):
        return None
    listed, count = config.get("id2label"), config.get("num_labels")
    if isinstance(listed, dict) and listed:
        return len(listed)
    return count if type(count) is int and count > 0 else 2  # the default of transformers


def _has_raw_scores(config: Mapping[str, Any]) -> bool:
    """Whether sentence-transformers applies no function to the number of a single label."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    return str(named or config.get("sbert_ce_default_activation_function")).endswith("Identity")


def _prompts(checkpoint: Checkpoint | ConfigCheckpoint) -> dict[str, Any]:
    """The prompts that config_sentence_transformers.json names."""
    settings = read_optional_json_object(checkpoint.path / "config_sentence_transformers.json")
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CorruptCheckpoint("config_sentence_transformers.json: prompts must map names to texts")
    if default is not None and default not in prompts:
        raise CorruptCheckpoint(f"config_sentence_transformers.json: there is no prompt {default!r:.60}")
    return {"prompts": prompts, "prompt": default}


def lacks_head(architectures: Any) -> bool:
    """Whether the checkpoint was saved from a backbone, such as MistralModel instead of MistralForCausalLM.

    Classes of other libraries with such names have a head, as InternVLChatModel does.
    """
    name = str(architectures[0]) if isinstance(architectures, list) and len(architectures) == 1 else ""
    if not name.endswith("Model") or name.endswith("LMHeadModel"):
        return False
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return any(name in (each if isinstance(each, tuple) else [each]) for each in MODEL_MAPPING_NAMES.values())


def _read_pooling(checkpoint: Checkpoint | ConfigCheckpoint, answers: tuple[str, str] | None) -> EmbeddingConfig:
    if checkpoint.format == "gguf":
        from chairlift.loading.gguf.checkpoint import GGUFCheckpoint

        assert isinstance(checkpoint, GGUFCheckpoint)
        metadata = checkpoint.file.metadata
        number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
        known = _GGUF_KINDS if isinstance(number, int) else {}
        return EmbeddingConfig(known.get(number, PoolingKind.MEAN), answers)
    modules = checkpoint.path / "modules.json"
    if not modules.exists():
        return EmbeddingConfig(answers=answers)
    entries = _modules(modules)
    others = sorted({name for name, _ in entries} - {"Transformer", "Pooling", "Normalize"})
    if others:
        problem = f"its embeddings need modules that are not supported: {', '.join(others)}"
        return EmbeddingConfig(answers=answers, problem=problem)
    paths = [path for name, path in entries if name == "Pooling"]
    if not paths or Path(paths[0]).name != paths[0]:
        raise CorruptCheckpoint(f"{modules}: names no folder with the settings of its pooling")
    settings = read_json_object(checkpoint.path / paths[0] / "config.json")
    kinds = {_KINDS.get(name) for name in _modes(settings)}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        modes = ", ".join(_modes(settings)) or "nothing"
        problem = f"its embeddings are pooled by {modes}; supported: mean, last token, first token"
        return EmbeddingConfig(answers=answers, problem=problem)
    return EmbeddingConfig(kind, answers)


def module_folders(folder: Path) -> list[str]:
    """The folders in a checkpoint's folder that have the settings of the modules that make embeddings."""
    modules = folder / "modules.json"
    paths = [path for _, path in _modules(modules)] if modules.exists() else []
    return [path for path in paths if path and Path(path).name == path]


def _modules(file: Path) -> list[tuple[str, str]]:
    """The kinds and paths of the modules."""
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CorruptCheckpoint(f"{file}: must hold a JSON list of objects")
    return [(str(module.get("type")).rsplit(".", 1)[-1], str(module.get("path", ""))) for module in modules]


def _modes(settings: dict[str, Any]) -> list[str]:
    """The pooling modes that are on: one flag for each in older files, a name or a list of names in newer ones."""
    named = settings.get("pooling_mode", [])
    flags = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
    return flags + [str(name) for name in (named if isinstance(named, list) else [named])]


def _answers(tokens: Any) -> tuple[str, str] | None:
    if tokens is None:
        return None
    if not isinstance(tokens, list) or len(tokens) != 2 or not all(isinstance(token, str) for token in tokens):
        raise CorruptCheckpoint(f"config.json: classifier_from_token must be two tokens, it is {tokens!r:.100}")
    return tokens[0], tokens[1]
