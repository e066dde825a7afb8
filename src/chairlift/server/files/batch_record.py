"""The state of one batch, as /v1/batches shows it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from chairlift.server.files.file_store import OUTPUT_SECONDS


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class BatchRecord(msgspec.Struct, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_seconds: int = OUTPUT_SECONDS  # from when they are written until the output files are deleted
    problem: str | None = None  # why the whole batch failed
    metadata: dict[str, str] | None = None
    key: bytes | None = None  # digest of the API key that created it
    tenant: str | None = None

    def enter(self, status: BatchStatus, now: float) -> None:
        """Change the status and note when."""
        self.status = status
        setattr(self, f"{status.value}_at", int(now))

    def is_expired(self, now: float) -> bool:
        """Whether it need not be kept any longer."""
        ends = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        ended = max((end for end in ends if end is not None), default=self.expires_at)
        return self.status.is_final and ended + OUTPUT_SECONDS <= now

    def body(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        counts = {name: fields.pop(name) for name in ("total", "completed", "failed")}
        for name in ("key", "tenant", "output_seconds"):
            del fields[name]
        problem = fields.pop("problem")
        errors = None if problem is None else {"object": "list", "data": [_error(problem)]}
        return {"object": "batch", **fields, "errors": errors, "request_counts": counts}


def _error(problem: str) -> dict[str, Any]:
    return {"code": "invalid_file", "message": problem, "param": "input_file_id", "line": None}
