"""Drive the engine one step at a time and print everything that happens."""

import os

from chairlift import EngineConfig, SamplingParams
from chairlift.engine.startup import load_engine

MODEL = os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m")

engine = load_engine(MODEL, EngineConfig(max_batch_tokens=64)).engine
for prompt in ("The capital of France is", "A chairlift never stops for boarding, and neither does"):
    engine.submit(engine.tokenizer.encode(prompt), SamplingParams(temperature=0, max_tokens=6))
while engine.has_work:
    for event in engine.step():
        print(event)
