"""A proposer of your own: draft that the text repeats with a given period, and count the steps this saves."""

import os
from collections.abc import Sequence

from chairlift import LLM, SamplingParams
from chairlift.core.events import StepDone
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.speculation.proposers import PROPOSERS
from chairlift.speculation.proposers.base import Draft, DraftTerms, StandaloneProposer

MODEL = os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m")
PROMPT = "Repeat this list: apple, banana, cherry, apple, banana, cherry, apple, banana, cherry, apple,"
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@PROPOSERS.register("period")
class PeriodProposer(StandaloneProposer):
    """`period:N` drafts the last N tokens again."""

    name = "period"
    argument = "N"  # shown in help texts
    max_length = 6  # draft tokens of a request in one step

    def __init__(self, argument: str) -> None:
        if not argument.isdecimal() or not int(argument):
            raise InvalidParameter("speculate", f"'period' needs a number of tokens, as in period:6, got {argument!r}")
        self._period = int(argument)

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[Draft | None]:
        return [self._draft(request, terms.length(request)) for request in requests]

    def _draft(self, request: Request, length: int) -> Draft | None:
        if request.num_known < self._period:
            return None
        last = list(request.tokens[-self._period :])
        tokens = (last * length)[:length]
        return Draft(tokens, levels=[7] * length)  # confidence from 0 to 9; the engine measures what it is worth


def generate(speculate: str | None = None) -> tuple[list[int], int]:
    """The output tokens and the number of steps they took."""
    steps: list[StepDone] = []
    llm = LLM(MODEL, speculate=speculate, progress=False)
    llm.engine.subscribe(lambda events: steps.extend(one for one in events if isinstance(one, StepDone)))
    return llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids, len(steps)


plain, plain_steps = generate()
drafted, drafted_steps = generate("period:6")  # "apple", ",", "banana", ",", "cherry", ","
assert drafted == plain, "speculation must not change the output"
print(f"{len(plain)} tokens: {plain_steps} steps without draft tokens, {drafted_steps} with them")
