"""A batching policy of your own: admit requests in pairs, and compare its steps with continuous batching."""

import os
from collections.abc import Sequence
from itertools import islice

from chairlift import LLM, SamplingParams
from chairlift.core.events import StepDone
from chairlift.core.policies.base import POLICIES, Policy, PolicyDecision
from chairlift.core.request import Request
from chairlift.core.scheduler.waiting_queue import WaitingQueue, WaitReason

MODEL = os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m")


@POLICIES.register("pairs")
class PairsPolicy(Policy):
    """Admits waiting requests while fewer than two are running."""

    name = "pairs"

    def decide(self, waiting: WaitingQueue, running: Sequence[Request], slots: int, now: float) -> PolicyDecision:
        room = max(0, 2 - len(running))
        return PolicyDecision(islice(waiting.in_admission_order(), room), WaitReason.BATCH_RUNNING)


def batch_sizes(policy: str) -> list[int]:
    """The number of requests in each step."""
    sizes: list[int] = []
    llm = LLM(MODEL, policy=policy, progress=False)
    llm.engine.subscribe(lambda events: sizes.extend(one.requests for one in events if isinstance(one, StepDone)))
    llm.generate(["One", "Two", "Three", "Four"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return sizes


for policy in ("continuous", "pairs"):
    sizes = batch_sizes(policy)
    print(f"{policy}: {len(sizes)} steps, at most {max(sizes)} requests in one")
