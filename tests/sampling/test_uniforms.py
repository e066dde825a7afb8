"""Random numbers for many requests at once equal those for each request by itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.sampling.params import MAX_SEED
from chairlift.core.sampling.randomness import uniform
from chairlift.sampling.draw import uniforms

PAIRS = st.lists(st.tuples(st.integers(0, MAX_SEED), st.integers(0, 2**31 - 2)), min_size=1, max_size=20)


@given(PAIRS)
def test_many_at_once_are_the_same_as_one_by_one(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*pairs, strict=True)
    found = uniforms(np.array(seeds, np.uint64), np.array(positions, np.int32))
    assert found.tolist() == [uniform(seed, position) for seed, position in pairs]
