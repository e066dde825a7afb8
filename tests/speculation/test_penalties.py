"""Penalties after draft tokens: as if those had been generated, on a copy of the counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.sampling.params import SamplingParams
from chairlift.sampling.parameters.edits import TokenCounts

TOKENS = st.lists(st.integers(0, 12), max_size=40)


@given(prompt=TOKENS, output=TOKENS, drafts=TOKENS, repetition=st.sampled_from([1.0, 1.3]))
def test_counts_after_drafts_equal_counts_of_generated_tokens(
    prompt: list[int], output: list[int], drafts: list[int], repetition: float
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=0.5)
    counts = TokenCounts(params, prompt, output)
    before = counts.ids.tolist(), counts.counts.tolist()
    found, wanted = counts.after(drafts), TokenCounts(params, prompt, [*output, *drafts])
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.counts.tolist() == wanted.counts.tolist()
    assert (counts.ids.tolist(), counts.counts.tolist()) == before


def test_drafts_of_known_tokens_share_the_ids() -> None:
    counts = TokenCounts(SamplingParams(repetition_penalty=1.3), range(1000), [5, 6])
    assert all(counts.after(drafts).ids.base is counts.ids.base for drafts in ([], [7], [7, 8, 7]))
