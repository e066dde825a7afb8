"""Decode with draft tokens from the request's own text: the same output in fewer steps."""

import os

from chairlift import LLM, SamplingParams
from chairlift.core.events import StepDone

MODEL = os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m")
PROMPT = "Repeat this list: apple, banana, cherry, apple, banana, cherry, apple, banana, cherry, apple,"
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def generate(**options: object) -> tuple[list[int], int]:
    """The output tokens and the number of steps they took."""
    llm = LLM(MODEL, progress=False, **options)
    steps = 0

    def count(events: object) -> None:
        nonlocal steps
        steps += sum(isinstance(event, StepDone) for event in events)

    llm.engine.subscribe(count)
    return llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids, steps


plain, plain_steps = generate()
drafted, drafted_steps = generate(speculate="ngram", draft_length=4)
assert drafted == plain, "speculation must not change the output"
print(f"{len(plain)} tokens: {plain_steps} steps without draft tokens, {drafted_steps} with them")
