"""Prefix caching on and off, on three kinds of traffic with common prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.progress import Note
from chairlift_lab.bench.prefix.options import PrefixSettings
from chairlift_lab.common.engine_run import Session, run_sessions
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.measure import Measurement
from chairlift_lab.common.workload import BenchRequest, TokenSource

MEMORY_SHARE = 0.5  # of the memory that all sessions need without sharing, so that memory limits the batch


def chat(settings: PrefixSettings, tokens: TokenSource) -> list[Session]:
    """Conversations in which every turn repeats all turns before it."""
    return _sessions(settings.users, tokens.draw(settings.system), settings.turns, settings, tokens)


def rag(settings: PrefixSettings, tokens: TokenSource) -> list[Session]:
    """Single questions, several of them about the same document."""
    documents = [tokens.draw(settings.document) for _ in range(settings.documents)]
    return [
        Session((BenchRequest(documents[index % len(documents)] + tokens.draw(settings.message), settings.answer),))
        for index in range(settings.questions)
    ]


def agents(settings: PrefixSettings, tokens: TokenSource) -> list[Session]:
    """A long tool list that never changes, then a task, then tool results one after the other."""
    return _sessions(settings.agents, tokens.draw(settings.tools), settings.steps, settings, tokens)


def _sessions(
    count: int, common: tuple[int, ...], turns: int, settings: PrefixSettings, tokens: TokenSource
) -> list[Session]:
    def session() -> Session:
        messages = [tokens.draw(settings.message) for _ in range(turns)]
        prompts = [common + messages[0], *messages[1:]]
        return Session(tuple(BenchRequest(prompt, settings.answer) for prompt in prompts))

    return [session() for _ in range(count)]


SCENARIOS: dict[str, Callable[[PrefixSettings, TokenSource], list[Session]]] = {
    "chat": chat,
    "rag": rag,
    "agents": agents,
}


@dataclass(frozen=True, slots=True)
class PrefixPoint:
    """One kind of traffic, with or without prefix caching."""

    scenario: str
    caching: bool
    kv_blocks: int  # blocks of the KV cache
    measured: Measurement

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were found in the cache."""
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
    """Without caching first, then with it: the same sessions, the same memory, a slot for each session."""
    points = []
    vocabulary = maker.vocabulary()
    for scenario in scenarios:
        sessions = SCENARIOS[scenario](settings, TokenSource(vocabulary, f"{scenario} {settings.seed}"))
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
