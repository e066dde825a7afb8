"""Print an answer while it is generated."""

import os

from chairlift import LLM, SamplingParams

llm = LLM(os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m"))
messages = [{"role": "user", "content": "Why is the sky blue?"}]
for piece in llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=64)):
    print(piece.text, end="", flush=True)
print()
