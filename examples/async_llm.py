"""Two tasks stream from one engine in this process; a third is cancelled."""

import asyncio
import os

from chairlift import AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24)


async def tell(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    async for piece in llm.stream(prompt, PARAMS):
        text += piece.text
    return text


async def main() -> None:
    async with AsyncLLM(os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m")) as llm:
        endless = asyncio.create_task(llm.generate("Once upon a time", SamplingParams(max_tokens=None)))
        prompts = ["The capital of France is", "A chairlift is"]
        for prompt, text in zip(prompts, await asyncio.gather(*(tell(llm, one) for one in prompts)), strict=True):
            print(prompt, "→", text)
        endless.cancel()  # frees its slot and its blocks


asyncio.run(main())
