"""The duration of a step as the sum of its kernels, which were measured one by one over grids of batch sizes.

The tables are those of LLMServingSim 2.0: products and norms by tokens, the head and the sampler by sequences,
attention by (tokens of prompt chunks, their context, decodes, their context), mixtures by (tokens, experts in use).
Columns that a version of them adds are not needed; newer ones have the mean length of a prompt's keys as context.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import product
from pathlib import Path

from chairlift.core.cost_model import StepShape
from chairlift.options import read_text
from chairlift_lab.simulator.step_cost import StepCost

# How often a layer launches a kernel; kernels that are not named run once.
PER_LAYER = {"layernorm": 2}
OUTSIDE_LAYERS = frozenset({"embedding", "final_layernorm"})
FILES = ("dense.csv", "per_sequence.csv", "attention.csv")
MIXTURE = ("tokens", "activated_experts")
MAX_TABLE_MIB = 64
_MICROSECONDS = 1e-6
Point = tuple[int, ...]


class Curve:
    """A line through measured points; beyond the last one it goes on as between the last two."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._sizes = sorted(points)
        self._seconds = [points[size] for size in self._sizes]

    def at(self, size: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        if len(sizes) == 1 or size <= sizes[0]:
            return seconds[0]
        right = min(bisect_left(sizes, size), len(sizes) - 1)
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


class Grid:
    """Measured points of several sizes, interpolated linearly along each, and beyond the last one as before it."""

    def __init__(self, points: Mapping[Point, float], canonical: Callable[[Point], Point] = tuple) -> None:
        """`canonical` names the point that stands for others with the same work."""
        self._points = points
        self._canonical = canonical
        self._axes = [sorted(set(axis)) for axis in zip(*points, strict=True)]

    def sizes(self, axis: int) -> list[int]:
        """The measured sizes along an axis."""
        return self._axes[axis]

    def at(self, *sizes: float) -> float:
        """The mean of the measured neighbours, each weighted by how close it is."""
        corners = self._corners(sizes)
        if None in [seconds for _, seconds in corners]:  # Beside a gap, nothing goes on as before.
            sizes = tuple(min(size, axis[-1]) for size, axis in zip(sizes, self._axes, strict=True))
            corners = [corner for corner in self._corners(sizes) if corner[1] is not None]
        total = sum(weight for weight, _ in corners)
        if not total:
            return self._points[min(self._points, key=lambda point: _distance(point, sizes))]
        return sum(weight * seconds for weight, seconds in corners if seconds is not None) / total

    def _corners(self, sizes: Sequence[float]) -> list[tuple[float, float | None]]:
        """The weights of the points around `sizes`, and their times: None where they were not measured."""
        corners = []
        for corner in product(*map(_neighbours, self._axes, sizes)):
            weight = math.prod(share for _, share in corner)
            if weight:
                corners.append((weight, self._points.get(self._canonical(tuple(size for size, _ in corner)))))
        return corners


def _distance(point: Point, sizes: Sequence[float]) -> float:
    """How far a point is off, in doublings of its sizes."""
    pairs = zip(point, sizes, strict=True)
    return sum(abs(math.log2((1 + measured) / (1 + size))) for measured, size in pairs)


def _neighbours(axis: Sequence[int], size: float) -> list[tuple[int, float]]:
    """The measured sizes around `size`, or the last two before it, with their weights."""
    right = bisect_left(axis, size)
    if len(axis) == 1 or right == 0 or (right < len(axis) and axis[right] == size):
        return [(axis[min(right, len(axis) - 1)], 1.0)]
    right = min(right, len(axis) - 1)
    share = (size - axis[right - 1]) / (axis[right] - axis[right - 1])
    return [(axis[right - 1], 1 - share), (axis[right], share)]


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of a model, for the number of experts that a batch uses."""

    count: int
    per_token: int
    devices: int = 1  # The experts are spread over so many.

    def in_use(self, tokens: int) -> float:
        """The expected number of different experts on each device, if the router chooses evenly."""
        return self.count / self.devices * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(eq=False)
class KernelTimes(StepCost):
    """A cost model of a simulation: the kernels of all layers, one after the other."""

    dense: Mapping[str, Curve]
    per_sequence: Mapping[str, Curve]
    attention: Grid
    num_layers: int
    mixture: Grid | None = None
    experts: Experts | None = None
    step_seconds: float = 0.0
    """What a step takes besides its kernels; an engine that works ahead hides it."""
    seconds_per_token: float = 0.0
    """For instance to add up the results of several devices."""
    _of_rows: dict[tuple[int, int], float] = field(default_factory=dict)
    _of_decodes: dict[int, Curve] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        folder: Path,
        num_layers: int,
        experts: Experts | None = None,
        *,
        step_seconds: float = 0.0,
        seconds_per_token: float = 0.0,
    ) -> KernelTimes:
        """Read the tables of a folder."""
        dense, per_sequence, attention = (read_table(folder / name) for name in FILES)
        mixture = None
        if experts is not None:
            rows = read_table(folder / "moe.csv")
            devices = _closest({int(row.get("ep", 1)) for row in rows}, experts.devices)
            mixture = Grid({_key(row, MIXTURE): _seconds(row) for row in rows if int(row.get("ep", 1)) == devices})
        return cls(
            _curves(dense, "tokens"),
            _curves(per_sequence, "sequences"),
            Grid(_attention_points(attention), _same_work),
            num_layers,
            mixture,
            experts,
            step_seconds,
            seconds_per_token,
        )

    def predict(self, shape: StepShape) -> float:
        return self._of_one(shape, self._rows(shape.tokens, shape.requests))

    def predict_together(self, shapes: Sequence[StepShape]) -> float:
        """Predict a step of several engines that exchange the rows of their mixtures in each layer, and so wait for
        the slowest."""
        own = (self._of_one(shape, self._own_rows(shape.tokens, shape.requests)) for shape in shapes if shape.requests)
        return max(own) + self._shared_rows(sum(shape.tokens for shape in shapes))

    def _of_one(self, shape: StepShape, fixed: float) -> float:
        """The time of a step whose rows take `fixed` seconds, with its attention."""
        decodes, prompts = shape.decode_tokens + shape.idle_rows, shape.prefill_tokens
        if not prompts:
            return fixed + self._decodes(decodes).at(shape.decode_kv / decodes if decodes else 0)
        # The chunks of several prompts count as one with their mean context.
        context = max(0.0, (shape.prefill_kv - prompts * (prompts + 1) / 2) / prompts)
        mean = shape.decode_kv / decodes if decodes else 0.0
        return fixed + self.num_layers * self.attention.at(prompts, context, decodes, mean)

    def decode_steps(self, size: int, idle: int, context: int, count: int) -> list[float]:
        rows = size + idle
        fixed, attention = self._rows(rows, size), self._decodes(rows)
        return [fixed + attention.at(read / rows) for read in range(context, context + count * size, size)]

    def _rows(self, tokens: int, sequences: int) -> float:
        """Everything but attention, which does not depend on what is in the cache."""
        seconds = self._of_rows.get((tokens, sequences))
        if seconds is None:
            seconds = self._own_rows(tokens, sequences) + self._shared_rows(tokens)
            self._of_rows[tokens, sequences] = seconds
        return seconds

    def _own_rows(self, tokens: int, sequences: int) -> float:
        """The rows of one engine, without those of a mixture."""
        layer = sum(
            PER_LAYER.get(name, 1) * curve.at(tokens)
            for name, curve in self.dense.items()
            if name not in OUTSIDE_LAYERS
        )
        outside = sum(curve.at(tokens) for name, curve in self.dense.items() if name in OUTSIDE_LAYERS)
        head = sum(curve.at(max(1, sequences)) for curve in self.per_sequence.values())
        return self.num_layers * layer + outside + head

    def _shared_rows(self, tokens: int) -> float:
        """The mixtures of all layers, and what devices exchange."""
        seconds = self.step_seconds + self.seconds_per_token * tokens
        if self.mixture is not None and self.experts is not None:
            seconds += self.num_layers * self.mixture.at(tokens, self.experts.in_use(tokens))
        return seconds

    def _decodes(self, count: int) -> Curve:
        """Attention of all layers by the mean context of `count` decodes."""
        curve = self._of_decodes.get(count)
        if curve is None:
            contexts = self.attention.sizes(3) if count else [0]
            points = {each: self.num_layers * self.attention.at(0, 0, count, each) for each in contexts}
            curve = self._of_decodes[count] = Curve(points)
        return curve


def _same_work(point: Point) -> Point:
    """Without prompts there is no context of prompts, and without decodes none of decodes."""
    chunk, context, decodes, kv = point
    if not (decodes and kv):
        decodes = kv = 0
    return (chunk, context, decodes, kv) if chunk else (0, 0, decodes, kv)


def _closest(degrees: Collection[int], wanted: int) -> int:
    """The measured number of devices that is closest to the real one."""
    return min(degrees, key=lambda degree: abs(math.log(degree / wanted)))


def _attention_points(rows: Sequence[Mapping[str, str]]) -> dict[Point, float]:
    """The times of attention by (chunk, its context, decodes, their context); those of several kernels are added."""
    points: dict[Point, float] = {(0, 0, 0, 0): 0.0}
    for row in rows:
        if int(row.get("decode_q_len") or 1) != 1:
            continue  # These rows verify draft tokens.
        chunk, decodes, kv = (int(row[name]) for name in ("prefill_chunk", "n_decode", "kv_decode"))
        # A chunk sees its context and, on average, half of itself.
        context = int(row["kv_prefill"]) if "kv_prefill" in row else round(float(row["prefill_key"]) - chunk / 2)
        point = (chunk, max(0, context), decodes, kv)
        points[point] = points.get(point, 0.0) + _seconds(row)
    return points


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    return list(csv.DictReader(StringIO(read_text(path, "recording", MAX_TABLE_MIB), newline="")))


def _curves(rows: Sequence[Mapping[str, str]], size: str) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        points.setdefault(row["layer"], {})[int(row[size])] = _seconds(row)
    return {name: Curve(each) for name, each in points.items()}


def _key(row: Mapping[str, str], names: Sequence[str]) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in names)


def _seconds(row: Mapping[str, str]) -> float:
    return _MICROSECONDS * float(row["time_us"])
