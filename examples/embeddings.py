"""Find the sentence that is closest to a question."""

import os

from chairlift import LLM

llm = LLM(os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m"))
sentences = ["A chairlift carries skiers up a mountain.", "Bread is baked in an oven.", "The engine batches requests."]
question = "How do people get up the mountain?"

(embedded,) = llm.embed(question)
print(f"{len(embedded.outputs.embedding)} dimensions, starting with {embedded.outputs.embedding[:3]}")
for sentence, result in zip(sentences, llm.score(question, sentences), strict=True):
    print(f"{result.outputs.score:6.3f}  {sentence}")
