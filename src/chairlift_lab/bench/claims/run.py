"""Measure what each claim is about, with the functions of the other benches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chairlift.engine.settings import resolve_machine
from chairlift.progress import Note
from chairlift_lab.bench.attention.options import AttentionSettings
from chairlift_lab.bench.attention.run import AttentionResults, run_attention
from chairlift_lab.bench.claims import about_batching as batching
from chairlift_lab.bench.claims import about_memory as memory
from chairlift_lab.bench.claims.about_chunking import judge_chunking
from chairlift_lab.bench.claims.batch_sizes import BatchSizePoint, compare_batch_sizes, measure_compute_share
from chairlift_lab.bench.claims.claim import ClaimVerdict
from chairlift_lab.bench.claims.kv_accounting import measure_joining_padding, measure_kv_waste, measure_shared_prefix
from chairlift_lab.bench.claims.prompt_stall import StallPoint, measure_stalls, random_maker
from chairlift_lab.bench.policies.run import PoliciesSettings, PolicyPoint, Strategy, compare_policies
from chairlift_lab.common.engines import EngineMaker

POLICIES = PoliciesSettings(
    strategies=tuple(Strategy.parse(text) for text in ("continuous", "dynamic", "static", "static/padded")),
)
ATTENTION = AttentionSettings(batches=(4, 16, 64), variations=(0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsSettings:
    """The defaults take about ten minutes on two cores with the default model."""

    batch_sizes: Sequence[int] = (1, 4, 16, 64)
    policies: PoliciesSettings = POLICIES
    attention: AttentionSettings = ATTENTION
    chunks: Sequence[int] = (128, 256, 512, 1024, 2048, 4096)
    chunked_prompt: int = 10_000
    joining_prompt: int = 100
    joining_batch: int = 8
    waste_requests: int = 32
    shared_prefix: int = 1000


@dataclass(slots=True)
class ClaimsResults:
    """The verdicts, and the points for the plot."""

    settings: ClaimsSettings
    verdicts: list[ClaimVerdict] = field(default_factory=list)
    batch_sizes: list[BatchSizePoint] = field(default_factory=list)
    policies: list[PolicyPoint] = field(default_factory=list)
    stalls: list[StallPoint] = field(default_factory=list)
    attention: AttentionResults = field(default_factory=AttentionResults)


class _Claims:
    """One method for each group of claims that share a measurement."""

    def __init__(self, maker: EngineMaker, settings: ClaimsSettings, note: Note) -> None:
        self._maker = maker
        self._settings = settings
        self._note = note
        self.results = ClaimsResults(settings)

    def compute(self) -> list[ClaimVerdict]:
        return [batching.judge_compute_share(measure_compute_share(self._maker, note=self._note))]

    def batching(self) -> list[ClaimVerdict]:
        self.results.batch_sizes = compare_batch_sizes(self._maker, sizes=self._settings.batch_sizes, note=self._note)
        return [batching.judge_batching(self.results.batch_sizes)]

    def policies(self) -> list[ClaimVerdict]:
        points = self.results.policies = compare_policies(self._maker, self._settings.policies, note=self._note)
        judges = (
            batching.judge_continuous_vs_dynamic,
            batching.judge_continuous_vs_static,
            batching.judge_useful_tokens,
        )
        return [judge(points) for judge in judges]

    def padding(self) -> list[ClaimVerdict]:
        self._note("a prompt that joins a batch")
        prompt, batch = self._settings.joining_prompt, self._settings.joining_batch
        found = {
            mode: measure_joining_padding(self._small(), mode, prompt=prompt, batch=batch)
            for mode in ("padded", "ragged", "bursted")
        }
        return [batching.judge_joining_padding(found, prompt, batch)]

    def chunking(self) -> list[ClaimVerdict]:
        prompt = self._settings.chunked_prompt
        points = self.results.stalls = measure_stalls(
            self._small(), prompt_len=prompt, chunks=self._settings.chunks, note=self._note
        )
        return [judge_chunking(points, prompt)]

    def prefix(self) -> list[ClaimVerdict]:
        self._note("a prefix that requests share")
        return [memory.judge_shared_prefix(measure_shared_prefix(self._small(), prefix=self._settings.shared_prefix))]

    def waste(self) -> list[ClaimVerdict]:
        self._note("KV memory that holds nothing")
        return [memory.judge_kv_waste(measure_kv_waste(self._small(), requests=self._settings.waste_requests))]

    def heads(self) -> list[ClaimVerdict]:
        self.results.attention.sharing = self._attention("sharing").sharing
        return [memory.judge_head_sharing(self.results.attention.sharing)]

    def tiling(self) -> list[ClaimVerdict]:
        self.results.attention.tiling = self._attention("tiling").tiling
        return memory.judge_tiling(self.results.attention.tiling)

    def modes(self) -> list[ClaimVerdict]:
        self.results.attention.modes = self._attention("modes").modes
        return [memory.judge_modes(self.results.attention.modes)]

    def cache(self) -> list[ClaimVerdict]:
        self.results.attention.cache = self._attention("cache").cache
        return [memory.judge_cache(self.results.attention.cache)]

    def _attention(self, experiment: str) -> AttentionResults:
        machine = resolve_machine(self._maker.config())
        return run_attention(
            self._settings.attention,
            machine.device,
            machine.dtype,
            experiments=[experiment],
            note=self._note,
        )

    def _small(self) -> EngineMaker:
        """Engines of a small model, for what is counted and not timed."""
        config = self._maker.config()
        return random_maker(config.device, config.dtype)


GROUPS: dict[str, Callable[[_Claims], list[ClaimVerdict]]] = {
    "compute": _Claims.compute,
    "batching": _Claims.batching,
    "policies": _Claims.policies,
    "padding": _Claims.padding,
    "chunking": _Claims.chunking,
    "prefix": _Claims.prefix,
    "heads": _Claims.heads,
    "waste": _Claims.waste,
    "tiling": _Claims.tiling,
    "modes": _Claims.modes,
    "cache": _Claims.cache,
}


def run_claims(
    maker: EngineMaker,
    settings: ClaimsSettings,
    *,
    groups: Sequence[str] = tuple(GROUPS),
    note: Note = lambda text: None,
) -> ClaimsResults:
    claims = _Claims(maker, settings, note)
    for name in groups:
        claims.results.verdicts += GROUPS[name](claims)
    return claims.results
