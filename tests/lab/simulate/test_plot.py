"""What the pictures of `simulate` and `plan` show."""

from __future__ import annotations

import pytest

from chairlift.core.cost_model import StepShape
from chairlift_lab.planning.prediction import decode_curve, unfinished_requests
from chairlift_lab.simulator.outcome import RequestRecord
from chairlift_lab.simulator.step_cost import LinearCost


class _CostOfPositions(LinearCost):
    """A step takes one second, and one more for every position that is read."""

    seconds_per_position = 1.0

    def predict(self, shape: StepShape) -> float:
        assert shape.decode_tokens == shape.requests
        return 1.0 + shape.decode_kv


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11])])
def test_the_decode_curve_doubles_up_to_the_largest_batch(largest: int, sizes: list[int]) -> None:
    curve = decode_curve(_CostOfPositions(), 10, largest)
    assert [point.batch for point in curve] == sizes
    assert [point.seconds for point in curve] == [1 + 10 * size for size in sizes]
    assert curve[-1].tokens_per_second == largest / (1 + 10 * largest)


def test_a_request_is_unfinished_from_its_arrival_to_its_end() -> None:
    times = ((0.0, 4.0), (1.0, 2.0), (2.0, 3.0))
    records = [RequestRecord(begin, 1, 1, 0, first_token=begin, end=end) for begin, end in times]
    assert unfinished_requests(records) == ([0.0, 1.0, 2.0, 2.0, 3.0, 4.0], [1, 2, 1, 2, 1, 0])
