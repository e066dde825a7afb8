"""Add a model's answers to a dataset with Ray Data: JSON lines in, Parquet out, on all machines of a Ray cluster.

Needs `pip install -e '.[ray-data]' -c constraints.txt`.
"""

import json
import os
import tempfile
from pathlib import Path

import ray
import ray.data

from chairlift.cluster import BatchPredictor

folder = Path(tempfile.mkdtemp())
questions = ["Why is the sky blue?", "Why does a batch never stop?", "What is a KV cache?", "Name a mountain."]
lines = [json.dumps({"id": index, "question": text}) for index, text in enumerate(questions)]
(folder / "questions.jsonl").write_text("\n".join(lines))

ray.init(include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
answered = ray.data.read_json(str(folder / "questions.jsonl")).map_batches(
    BatchPredictor,
    fn_constructor_kwargs={
        "model": os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m"),
        "task": "chat",
        "column": "question",
        "sampling": {"temperature": 0, "max_tokens": 24},
        "kv_memory": "64MiB",
    },
    compute=ray.data.ActorPoolStrategy(size=1),  # as many engines
    num_cpus=1,  # and num_gpus=1 with GPUs
    batch_size=2,  # some hundreds for a real dataset: a batch ends when its longest answer does
)
answered.write_parquet(str(folder / "answers"))
for row in ray.data.read_parquet(str(folder / "answers")).sort("id").take_all():
    print(f"{row['question']!r} -> {row['generated_text']!r} ({row['finish_reason']})")
