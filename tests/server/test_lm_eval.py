"""lm-evaluation-harness scores local texts through the server (`local-completions`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.server.running_server import NAME, RunningServer
from tests.tiny import SENTENCES

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("CHAIRLIFT_LM_EVAL_PYTHON", sys.executable)  # an interpreter that has lm_eval

TASK = """
task: chairlift_words
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{begin}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: right
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def has_lm_eval() -> bool:
    if sys.executable != PYTHON:
        return True
    return importlib.util.find_spec("lm_eval") is not None


@pytest.mark.skipif(not has_lm_eval(), reason="lm_eval is not installed: pip install 'lm_eval[api]'")
def test_a_task_of_local_texts(server: RunningServer, tiny_folder: Path, tmp_path: Path) -> None:
    halves = [(" ".join(text.split()[:5]), " " + " ".join(text.split()[5:8])) for text in SENTENCES]
    documents = [
        {"begin": begin, "ends": [end, other], "right": 0}
        for (begin, end), (_, other) in zip(halves, [*halves[1:], halves[0]], strict=True)
    ]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(TASK.format(file=data))
    url = f"base_url={server.url}/v1/completions,model={NAME},tokenizer={tiny_folder}"
    done = subprocess.run(
        [
            PYTHON,
            "-m",
            "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            f"{url},num_concurrent=2,max_length=200",
            "--tasks",
            "chairlift_words",
            "--include_path",
            str(tmp_path / "tasks"),
            "--output_path",
            str(tmp_path / "out"),
            "--log_samples",
            "--batch_size",
            "2",
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(documents)
    for sample in found:
        for text, (answer, *_) in zip(sample["doc"]["ends"], sample["filtered_resps"], strict=True):
            expected, greedy = reference(tiny_folder, sample["doc"]["begin"], text)
            assert float(answer) == pytest.approx(expected, abs=1e-3)
            assert greedy is False  # a random model does not continue texts


def reference(folder: Path, begin: str, end: str) -> tuple[float, bool]:
    """The log-probability of `end` after `begin` by transformers, and whether it is the greedy continuation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, start = tokenizer(begin + end).input_ids, len(tokenizer(begin).input_ids)
    with torch.inference_mode():
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    places = range(start, len(tokens))
    score = sum(float(rows[i - 1, tokens[i]]) for i in places)
    return score, all(int(rows[i - 1].argmax()) == tokens[i] for i in places)
