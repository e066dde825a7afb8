"""Random requests of every kind, with shared prefixes and prompts that quote earlier answers."""

from __future__ import annotations

import importlib.util
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure

LONGEST_PROMPT, LONGEST_OUTPUT = 100, 40
LENGTHS = (1, 2, 5, 13, 30, 60, LONGEST_PROMPT)
KINDS = {"greedy": 12, "scored": 2, "drawn": 4, "several": 3, "beams": 2, "best of": 1, "penalised": 2, "structured": 3}
PATTERN = "[0-9]{2,4}-[a-f]{1,6}"


@dataclass(frozen=True, slots=True)
class StressRequest:
    kind: str
    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]  # arguments of Engine.submit

    @property
    def is_greedy(self) -> bool:
        """Whether every token must be the argmax."""
        return self.kind in ("greedy", "scored") or (self.kind == "several" and self.params.temperature == 0)


class Traffic:
    """The same seed makes the same requests, as long as the answers are the same."""

    def __init__(self, seed: int, *, num_tokens: int) -> None:
        self.rng = random.Random(seed)
        self._num_tokens = num_tokens  # prompts hold tokens 0 to num_tokens - 1
        self._prefixes = [self._random(self.rng.randint(6, 50)) for _ in range(4)]
        self._earlier: deque[list[int]] = deque(maxlen=32)
        weights = dict(KINDS)
        if importlib.util.find_spec("llguidance") is None:
            del weights["structured"]
        self._kinds, self._weights = list(weights), list(weights.values())

    def request(self) -> StressRequest:
        rng = self.rng
        (kind,) = rng.choices(self._kinds, self._weights)
        options: dict[str, Any] = {"timeout": rng.uniform(0.001, 0.1)} if rng.random() < 0.03 else {}
        options |= {"cache_salt": "another"} if rng.random() < 0.1 else {}
        return StressRequest(kind, self._prompt(), self._params(kind), options)

    def remember(self, tokens: Sequence[int]) -> None:
        """Keep tokens that later prompts may quote."""
        self._earlier.append(list(tokens))

    def _random(self, count: int) -> list[int]:
        return [self.rng.randrange(self._num_tokens) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng, length = self.rng, self.rng.choice(LENGTHS)
        kind = rng.randrange(4)
        if kind == 0:
            begun = rng.choice(self._prefixes)
        elif kind == 1 and self._earlier:
            begun = rng.choice(self._earlier)
        elif kind == 2:
            begun = self._random(rng.randint(1, 4)) * length
        else:
            begun = []
        return (begun[: rng.randint(0, LONGEST_PROMPT)] + self._random(length))[:LONGEST_PROMPT]

    def _params(self, kind: str) -> SamplingParams:
        rng = self.rng
        common: dict[str, Any] = {"max_tokens": rng.randint(1, LONGEST_OUTPUT), "ignore_eos": rng.random() < 0.7}
        drawn: dict[str, Any] = {
            "temperature": rng.uniform(0.3, 1.5),
            "top_k": rng.choice([0, 5, 40]),
            "top_p": rng.choice([1.0, 0.8]),
        }
        width = rng.randint(2, 3)
        match kind:
            case "greedy":
                return SamplingParams(temperature=0.0, detokenize=rng.random() < 0.5, **common)
            case "scored":
                return SamplingParams(temperature=0.0, logprobs=rng.randint(0, 5), **common)
            case "drawn":
                return SamplingParams(**drawn, seed=rng.randrange(1000), min_p=rng.choice([0.0, 0.05]), **common)
            case "several":
                drawn = drawn if rng.random() < 0.5 else {"temperature": 0.0}
                return SamplingParams(**drawn, n=rng.randint(2, 4), **common)
            case "beams":
                return SamplingParams(beam_width=width, n=rng.randint(1, width), max_tokens=common["max_tokens"])
            case "best of":
                return SamplingParams(temperature=0.9, best_of=3, n=rng.randint(1, 3), **common)
            case "penalised":
                return SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, **common)
            case _:
                return SamplingParams(temperature=0.0, structure=Structure.regex(PATTERN), max_tokens=30)
