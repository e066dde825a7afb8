"""`BatchPredictor` adds columns with answers to batches of rows, as Ray Data passes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.cluster import BatchPredictor
from chairlift.errors import InvalidParameter
from tests.tiny import write_tiny_checkpoint

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_memory": "2MiB"}
GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny, progress=False, **OPTIONS)


def objects(values: list[Any]) -> np.ndarray[Any, Any]:
    """A column of values of different lengths."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def test_rows_keep_their_columns_and_get_answers(tiny: str, llm: LLM) -> None:
    predict = BatchPredictor(tiny, column="text", sampling=GREEDY, **OPTIONS)
    texts = ["a chairlift", "many sequences are concatenated", "blocks"]
    rows = predict({"text": np.array(texts, dtype=object), "id": np.arange(3)})
    expected = llm.generate(texts, SamplingParams(**GREEDY), use_tqdm=False)
    assert rows["generated_text"] == [result.outputs[0].text for result in expected]
    assert rows["num_prompt_tokens"] == [len(result.prompt_token_ids) for result in expected]
    assert rows["num_output_tokens"] == [4, 4, 4]
    assert rows["finish_reason"] == ["length"] * 3
    assert rows["error"] == [None] * 3
    assert rows["id"].tolist() == [0, 1, 2]
    # Token ids of one length are a matrix in numpy, others are arrays in an array.
    ids = [result.prompt_token_ids for result in expected]
    assert predict({"text": objects([np.array(one) for one in ids])})["generated_text"] == rows["generated_text"]
    assert predict({"text": np.array([ids[0], ids[0]])})["generated_text"] == [rows["generated_text"][0]] * 2


def test_a_row_that_cannot_be_answered_has_the_reason(tiny: str) -> None:
    predict = BatchPredictor(tiny, sampling=GREEDY, **OPTIONS)
    rows = predict({"prompt": objects(["word " * 300, "a chairlift", None, []])})
    assert [text is None for text in rows["generated_text"]] == [True, False, True, True]
    assert rows["error"][1] is None
    assert "256" in rows["error"][0]
    assert "NoneType" in rows["error"][2]
    assert rows["finish_reason"] == [None, "length", None, None]
    assert predict({"prompt": objects([None])})["num_output_tokens"] == [None]


def test_a_column_may_have_messages_or_texts_of_users(tiny: str, llm: LLM) -> None:
    predict = BatchPredictor(tiny, task="chat", sampling=GREEDY, **OPTIONS)
    conversation = [{"role": "user", "content": "hello"}]
    as_arrow = objects([np.array([{"role": "user", "content": "hello", "name": None}], dtype=object), "hello"])
    expected = llm.chat(conversation, SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0].text
    assert predict({"prompt": as_arrow})["generated_text"] == [expected] * 2


def test_embeddings(tiny: str, llm: LLM) -> None:
    rows = BatchPredictor(tiny, task="embed", **OPTIONS)({"prompt": objects(["a chairlift", None])})
    assert rows["embedding"] == [llm.embed("a chairlift", use_tqdm=False)[0].outputs.embedding, None]
    assert "generated_text" not in rows


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"task": "translate"}, "task"),
        ({"sampling": {"n": 2}}, "n"),
        ({"task": "embed", "sampling": {"max_tokens": 2}}, "sampling"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"frobnicate": True}, "frobnicate"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(arguments: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        BatchPredictor("nowhere", **arguments)
    assert error.value.parameter == parameter


def test_batches_of_another_shape_are_refused(tiny: str) -> None:
    predict = BatchPredictor(tiny, column="text", **OPTIONS)
    with pytest.raises(InvalidParameter, match="column: 'text' is not among the columns id, prompt"):
        predict({"id": [1], "prompt": ["a"]})
    with pytest.raises(InvalidParameter, match="batch_format: must be numpy, but batches are of type list"):
        predict([1])  # type: ignore[arg-type]
