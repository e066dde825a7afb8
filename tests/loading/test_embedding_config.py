"""What checkpoints say about their embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.core.sampling.params import PoolingKind
from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.embedding_config import EmbeddingConfig, read_embedding_config
from chairlift.loading.known_models import DEFAULT_MODEL


class Folder:
    """The part of a checkpoint that is read."""

    format = "safetensors"

    def __init__(self, path: Path, config: dict[str, Any] | None = None) -> None:
        self.path = path
        self.config = config or {}


def read(path: Path, config: dict[str, Any] | None = None) -> EmbeddingConfig:
    return read_embedding_config(Folder(path, config))  # type: ignore[arg-type]


def write(path: Path, pooling: dict[str, Any], *more: str) -> None:
    names = ["Transformer", "Pooling", *more]
    modules = [{"type": f"sentence_transformers.models.{name}", "path": f"{i}_{name}"} for i, name in enumerate(names)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_other_models_take_the_mean(tmp_path: Path) -> None:
    assert read(tmp_path) == EmbeddingConfig(PoolingKind.MEAN)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, PoolingKind.MEAN),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, PoolingKind.LAST),
        ({"pooling_mode": "lasttoken"}, PoolingKind.LAST),
        ({"pooling_mode": ["mean"]}, PoolingKind.MEAN),
    ],
)
def test_settings_of_sentence_transformers(tmp_path: Path, pooling: dict[str, Any], kind: PoolingKind) -> None:
    write(tmp_path, pooling, "Normalize")
    assert read(tmp_path) == EmbeddingConfig(kind)


@pytest.mark.parametrize(
    ("pooling", "more", "problem"),
    [
        ({"pooling_mode_max_tokens": True}, [], "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, [], "pooling_mode_mean_tokens, "),
        ({}, [], "nothing"),
        ({"pooling_mode_mean_tokens": True}, ["Dense"], "Dense"),
    ],
)
def test_what_cannot_be_computed_is_refused_on_use(
    tmp_path: Path, pooling: dict[str, Any], more: list[str], problem: str
) -> None:
    write(tmp_path, pooling, *more)
    with pytest.raises(UnsupportedModel, match=problem):
        read(tmp_path).require()


@pytest.mark.parametrize("text", ["{", "{}", "[3]", '[{"type": "a.Pooling", "path": "../1_Pooling"}]'])
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"modules\.json"):
        read(tmp_path)


def test_rerankers_name_their_answers(tmp_path: Path) -> None:
    assert read(tmp_path, {"classifier_from_token": ["no", "yes"]}).answers == ("no", "yes")
    for wrong in (["yes"], "yes", [1, 2]):
        with pytest.raises(CorruptCheckpoint, match="classifier_from_token"):
            read(tmp_path, {"classifier_from_token": wrong})


@pytest.mark.parametrize(
    ("architecture", "generates"),
    [
        *(("GPT2LMHeadModel", True), ("XLMWithLMHeadModel", True), ("LlamaForCausalLM", True), ("MistralModel", False)),
        *(("InternVLChatModel", True), ("Qwen2_5OmniModel", True), ("Gemma3TextModel", False)),
    ],
)
def test_classes_without_a_head(architecture: str, generates: bool, tmp_path: Path) -> None:
    assert read(tmp_path, {"architectures": [architecture]}).generates == generates


@pytest.mark.model
def test_the_default_model_takes_the_mean() -> None:
    from chairlift.loading.checkpoint import open_checkpoint
    from chairlift.loading.resolve import resolve_model

    assert read_embedding_config(open_checkpoint(resolve_model(DEFAULT_MODEL))) == EmbeddingConfig()
