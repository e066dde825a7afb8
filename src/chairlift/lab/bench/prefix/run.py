"""What reusing the start of earlier prompts is worth, on three kinds of traffic that repeat themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.lab.common.engine_run import Session, run_sessions
from chairlift.lab.common.engines import EngineMaker
from chairlift.lab.common.measure import Measurement
from chairlift.lab.common.timing import Note
from chairlift.lab.common.workload import BenchRequest

MEMORY_SHARE = 0.5  # of what all sessions would take without sharing: so memory limits the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings:
    """Lengths are in tokens. The defaults take a minute or two on two cores with the default model."""

    users: int = 8  # chat: each with a conversation of his own, after a system prompt that all share
    turns: int = 4
    system: int = 48
    message: int = 24
    documents: int = 4  # RAG: every question comes with one of these documents in front
    document: int = 256
    questions: int = 16
    agents: int = 8  # agents: the same tool descriptions, then steps that each add a tool's result
    tools: int = 384
    steps: int = 3
    answer: int = 16  # tokens generated each time
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name == "seed" else 1):
                raise InvalidParameter(name, f"must be at least {0 if name == 'seed' else 1}, got {value}")


class _Words:
    """Random tokens."""

    def __init__(self, vocabulary: Sequence[int], seed: str) -> None:
        self._vocabulary, self._source = vocabulary, random.Random(seed)

    def __call__(self, count: int) -> tuple[int, ...]:
        return tuple(self._source.choices(self._vocabulary, k=count))


def chat(settings: PrefixSettings, words: _Words) -> list[Session]:
    """Every turn repeats the whole conversation so far."""
    system = words(settings.system)

    def user() -> Session:
        messages = [words(settings.message) for _ in range(settings.turns)]
        return Session(tuple(BenchRequest(text, settings.answer) for text in [system + messages[0], *messages[1:]]))

    return [user() for _ in range(settings.users)]


def rag(settings: PrefixSettings, words: _Words) -> list[Session]:
    """Single questions, many of them about the same document."""
    documents = [words(settings.document) for _ in range(settings.documents)]
    return [
        Session((BenchRequest(documents[index % len(documents)] + words(settings.message), settings.answer),))
        for index in range(settings.questions)
    ]


def agents(settings: PrefixSettings, words: _Words) -> list[Session]:
    """Long descriptions of tools that never change, then a task, then results of tools one after the other."""
    tools = words(settings.tools)

    def agent() -> Session:
        results = [words(settings.message) for _ in range(settings.steps)]
        return Session(tuple(BenchRequest(text, settings.answer) for text in [tools + results[0], *results[1:]]))

    return [agent() for _ in range(settings.agents)]


SCENARIOS: dict[str, Callable[[PrefixSettings, _Words], list[Session]]] = {"chat": chat, "rag": rag, "agents": agents}


@dataclass(frozen=True, slots=True)
class PrefixPoint:
    """One kind of traffic, with or without prefix caching."""

    scenario: str
    caching: bool
    kv_blocks: int  # there were
    measured: Measurement

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that need not be computed."""
        assert self.measured.inside is not None
        return self.measured.inside.cached_tokens / self.measured.input_tokens

    def row(self) -> dict[str, Any]:
        name = f"{self.scenario}, {'with' if self.caching else 'without'} prefix caching"
        extra = {"scenario": self.scenario, "prefix_caching": self.caching, "hit_rate": self.hit_rate}
        return self.measured.row(name) | extra | {"kv_blocks": self.kv_blocks}


def compare_prefix_caching(
    maker: EngineMaker,
    settings: PrefixSettings,
    *,
    scenarios: Sequence[str] = tuple(SCENARIOS),
    note: Note = lambda text: None,
) -> list[PrefixPoint]:
    """Without caching first, then with; the same sessions, the same memory, a seat for each session."""
    points = []
    for scenario in scenarios:
        sessions = SCENARIOS[scenario](settings, _Words(maker.vocabulary(), f"{scenario} {settings.seed}"))
        block_size = maker.config().block_size
        needs = [-(-session.longest // block_size) for session in sessions]
        num_blocks = max(int(sum(needs) * MEMORY_SHARE), max(needs) + 1)
        for caching in (False, True):
            note(f"{scenario}, {'with' if caching else 'without'} prefix caching")
            engine = maker.engine(
                prefix_caching=caching, kv_memory=maker.kv_memory(num_blocks), max_batch_requests=len(sessions)
            )
            points.append(PrefixPoint(scenario, caching, num_blocks, run_sessions(engine, sessions)))
    return points


def parse_scenarios(text: str) -> list[str]:
    """ "chat, rag" -> those, each known and named once."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SCENARIOS or names.count(name) > 1:
            raise InvalidParameter("scenarios", f"{name!r} is no choice here; name {', '.join(SCENARIOS)} once each")
    return names
