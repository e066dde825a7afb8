"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading import tokenizer
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.tokenizer import TokenizerFiles, load_tokenizer

VOCABULARY = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5, "<unk>": 6}


def _checkpoint(folder: Path) -> Checkpoint:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    return open_checkpoint(folder)


def _write(folder: Path, settings: dict[str, Any] | None, template: str | None) -> None:
    backend = Tokenizer(BPE(VOCABULARY, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if template is not None:
        backend.post_processor = TemplateProcessing(template, special_tokens=[("<s>", 0), ("</s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _load(folder: Path, settings: dict[str, Any] | None = None, *, adds_bos: bool = False) -> TokenizerFiles:
    _write(folder, settings, "<s> $A" if adds_bos else None)
    return load_tokenizer(_checkpoint(folder))


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    files = _load(tmp_path)
    assert files.tokenizer.encode("ab a").ids == [4, 5, 2]
    assert (files.chat_template, files.bos_token, files.eos_token, files.add_bos) == (None, None, None, False)
    assert files.template_variables == {}


def test_special_tokens_may_be_strings_or_mappings(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    files = _load(tmp_path, settings, adds_bos=True)
    assert (files.bos_token, files.eos_token, files.add_bos) == ("<s>", "</s>", True)
    assert files.template_variables == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.tokenizer.encode("a").ids == [0, 2]


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "x", "unk_token": {"content": "<unk>"}}')
    files = _load(tmp_path, {"bos_token": "<s>"})
    assert files.template_variables == {"bos_token": "<s>", "unk_token": "<unk>"}


PROCESSORS = {"none": None, "bos": "<s> $A", "eos": "$A </s>", "both": "<s> $A </s>"}
CLASSES = [
    ("llama", "LlamaTokenizer"),
    ("llama", "PreTrainedTokenizerFast"),
    ("qwen3", "Qwen2Tokenizer"),
    ("qwen2", None),
    ("mistral", "LlamaTokenizerFast"),
    ("gemma2", "GemmaTokenizer"),
    ("gpt2", "GPT2Tokenizer"),
    ("olmo2", "GPTNeoXTokenizer"),
    ("olmoe", "GPTNeoXTokenizerFast"),
    ("gpt_neox", None),
    ("code_llama", "CodeLlamaTokenizer"),
]


@pytest.mark.parametrize(("model_type", "tokenizer_class"), CLASSES)
def test_bos_and_eos_are_those_of_transformers(model_type: str, tokenizer_class: str | None, tmp_path: Path) -> None:
    """Over all combinations of what tokenizer.json and the two settings of tokenizer_config.json say."""
    from transformers import AutoTokenizer

    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if tokenizer_class is not None:
        settings["tokenizer_class"] = tokenizer_class
    _checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for (named, template), add_bos, add_eos in product(PROCESSORS.items(), (None, True, False), (None, True, False)):
        given = {"add_bos_token": add_bos, "add_eos_token": add_eos}
        _write(tmp_path, settings | {name: value for name, value in given.items() if value is not None}, template)
        theirs = AutoTokenizer.from_pretrained(tmp_path)("ab")["input_ids"]
        ours = load_tokenizer(open_checkpoint(tmp_path))
        ids = ours.tokenizer.encode("ab").ids
        assert (ids[0] == 0, ids[-1] == 1) == (theirs[0] == 0, theirs[-1] == 1), (named, add_bos, add_eos)
        assert ours.add_bos == (ids[0] == 0)


def test_model_types_of_classes_that_replace_the_post_processor() -> None:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    for name, adds_bos in tokenizer._REPLACING_CLASSES.items():
        of_class = {model_type for model_type, one in TOKENIZER_MAPPING_NAMES.items() if one == name}
        assert of_class == tokenizer._MODEL_TYPES[adds_bos]


@pytest.mark.parametrize("setting", ["add_bos_token", "add_eos_token"])
def test_a_final_token_stays_where_only_the_other_setting_is_named(setting: str, tmp_path: Path) -> None:
    """Qwen3-Embedding has add_bos_token: false, and its tokenizer.json adds the token whose state is the embedding."""
    _checkpoint(tmp_path)
    _write(tmp_path, {"bos_token": None, "eos_token": "</s>", setting: False}, "$A </s>")
    assert load_tokenizer(open_checkpoint(tmp_path)).tokenizer.encode("a").ids == [2, 1]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ one }}", "{{ one }}"),
        ([{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}], "D"),
        ([{"name": "chat", "template": "C"}], "C"),
        ([], None),
    ],
)
def test_chat_template_of_tokenizer_config(template: Any, expected: str | None, tmp_path: Path) -> None:
    assert _load(tmp_path, {"chat_template": template}).chat_template == expected


def test_chat_template_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ ü }}", encoding="utf-8")
    assert _load(tmp_path, {"chat_template": "other"}).chat_template == "{{ ü }}"


def test_a_chat_template_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="chat_template"):
        _load(tmp_path, {"chat_template": 7})


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "Nope"}}'])
def test_a_damaged_tokenizer_json_is_refused(content: bytes, tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json: no tokenizer can be made"):
        load_tokenizer(checkpoint)


PANICS = {
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
}


@pytest.mark.parametrize("part", PANICS)
def test_a_tokenizer_json_that_makes_the_library_panic_is_refused(part: str, tmp_path: Path) -> None:
    _load(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: PANICS[part]}))
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json: no tokenizer can be made"):
        load_tokenizer(_checkpoint(tmp_path))


def test_padding_settings_of_the_training_are_ignored(tmp_path: Path) -> None:
    _load(tmp_path)
    file = tmp_path / "tokenizer.json"
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "<s>"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding": padding}))
    assert load_tokenizer(_checkpoint(tmp_path)).tokenizer.encode("ab a").ids == [4, 5, 2]


def test_vocabulary_and_merges_are_converted_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(VOCABULARY | {"<|endoftext|>": 7}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    files = load_tokenizer(_checkpoint(tmp_path))
    assert files.tokenizer.encode("ab a").ids == [4, 5, 2]


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        load_tokenizer(_checkpoint(tmp_path))


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    """A tokenizer in Python code is refused without a prompt."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\nclass Evil: pass\n")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel):
        load_tokenizer(_checkpoint(tmp_path))
    assert not (tmp_path / "pwned").exists()
