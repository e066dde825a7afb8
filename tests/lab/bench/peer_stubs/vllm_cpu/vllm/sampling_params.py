from __future__ import annotations

from enum import StrEnum


class RequestOutputKind(StrEnum):
    DELTA = "delta"
