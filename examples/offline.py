"""Complete several prompts in one call: one ragged batch per step, results in the order of the prompts."""

import os

from chairlift import LLM, SamplingParams

llm = LLM(os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m"))
prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
params = [
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=32),
    SamplingParams(temperature=0, max_tokens=48, stop="\n\n"),
]
for result in llm.generate(prompts, params, use_tqdm=False):
    completion = result.outputs[0]
    print(f"{result.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
