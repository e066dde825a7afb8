"""Published claims, their sources and verdicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Holds(StrEnum):
    YES = "yes"
    PARTLY = "partly"
    NO = "no"

    @classmethod
    def judge(cls, whole: bool, in_part: bool = False) -> Holds:
        return cls.YES if whole else cls.PARTLY if in_part else cls.NO


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """One claim and what was measured."""

    claim: str
    source: str
    measured: str
    holds: Holds
    why: str  # the explanation of the figure, above all where it differs from the claim
    figures: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {"name": self.claim} | asdict(self) | {"holds": str(self.holds)}


GUIDES = "guides to LLM serving"
ANYSCALE = "Anyscale, continuous batching, 2023"
HUGGING_FACE = "Hugging Face, continuous batching from first principles, 2025"
PAGED_ATTENTION = "PagedAttention (vLLM), 2023"
FLASH_ATTENTION = "FlashAttention, 2022"
GQA = "Ainslie et al., GQA, 2023"
SARATHI = "Sarathi-Serve, 2024"
