"""Logit edits for a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS, Stage
from chairlift.sampling.parameters.base import EditedRow, LogitsEdit, SampledRequest


def edits_of(request: SampledRequest) -> tuple[LogitsEdit, ...]:
    """Create the logit edits that the request's parameters need; most requests need none."""
    names = request.params.implementations(Stage.LOGITS)
    return tuple(cast(type[LogitsEdit], SAMPLING_PARAMETERS.get(name))(request) for name in names)


def edit_logits(logits: Tensor, rows: Iterable[EditedRow[Any]]) -> None:
    """Apply every row's edit to logits [S, V] in place, all edits of one kind together."""
    kinds: dict[type[LogitsEdit], list[EditedRow[Any]]] = {}
    for row in rows:
        kinds.setdefault(type(row.edit), []).append(row)
    for kind in sorted(kinds, key=lambda kind: (kind.order, kind.__name__)):
        kind.edit_rows(logits, kinds[kind])
