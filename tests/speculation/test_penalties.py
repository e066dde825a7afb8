"""What penalties look at behind guesses: as if these had been generated, at the price of a copy of the counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.sampling_params import SamplingParams
from chairlift.sampling.parameters.penalties import TokenCounts

TOKENS = st.lists(st.integers(0, 12), max_size=40)


@given(prompt=TOKENS, output=TOKENS, guesses=TOKENS, repetition=st.sampled_from([1.0, 1.3]))
def test_after_guesses_it_is_as_if_they_were_there(
    prompt: list[int], output: list[int], guesses: list[int], repetition: float
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=0.5)
    counts = TokenCounts(params, prompt, output)
    before = counts.ids.tolist(), counts.counts.tolist()
    found, wanted = counts.after(guesses), TokenCounts(params, prompt, [*output, *guesses])
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.counts.tolist() == wanted.counts.tolist()
    assert (counts.ids.tolist(), counts.counts.tolist()) == before


def test_guesses_of_known_tokens_share_the_ids() -> None:
    counts = TokenCounts(SamplingParams(repetition_penalty=1.3), range(1000), [5, 6])
    assert all(counts.after(guesses).ids.base is counts.ids.base for guesses in ([], [7], [7, 8, 7]))
