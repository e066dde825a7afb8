"""Several LoRA adapters over one base model, in one batch.

python examples/lora.py poet=adapters/poet lawyer=adapters/lawyer
"""

import sys

from chairlift import LLM, SamplingParams


def main(arguments: list[str]) -> None:
    adapters = dict(argument.split("=", 1) for argument in arguments)
    llm = LLM("smollm2-135m", lora=adapters, max_loras=max(1, len(adapters)))
    names = [None, *adapters]
    results = llm.generate(["The sea is"] * len(names), SamplingParams(temperature=0.0, max_tokens=24), lora=names)
    for name, result in zip(names, results, strict=True):
        print(f"{name or 'base model'}: {result.outputs[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
