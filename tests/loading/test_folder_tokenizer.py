"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.tokenizer import TokenizerFiles, load_tokenizer

VOCABULARY = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5, "<unk>": 6}


def _checkpoint(folder: Path) -> Checkpoint:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    return open_checkpoint(folder)


def _load(folder: Path, settings: dict[str, Any] | None = None, *, adds_bos: bool = False) -> TokenizerFiles:
    tokenizer = Tokenizer(BPE(VOCABULARY, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
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


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("add_bos_token", [True, False])
def test_add_bos_token_overrides_the_post_processor(adds_bos: bool, add_bos_token: bool, tmp_path: Path) -> None:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos_token}
    files = _load(tmp_path, settings, adds_bos=adds_bos)
    assert files.add_bos == add_bos_token
    assert files.tokenizer.encode("a").ids == ([0, 2] if add_bos_token else [2])


def test_add_eos_token(tmp_path: Path) -> None:
    files = _load(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True})
    assert files.tokenizer.encode("a").ids == [2, 1]
    assert not files.add_bos


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
