"""Limits of API keys and of the server apply to batches."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import InvalidParameter
from chairlift.server.access.keys import APIKey, KeyLimits, KeyTable, _digest
from chairlift.server.batch.input import scan
from chairlift.server.files.batch_record import BatchRecord
from chairlift.server.files.folder import FilesFolder
from tests.server.front_end import NAME, front_end
from tests.server.running_server import wait_for

PATH = "/v1/completions"
LIMITED = APIKey("limited", _digest("sk-limited"), KeyLimits(tokens_per_minute=100))
REMOVED = APIKey("removed", _digest("sk-removed"))


def add_batch(folder: FilesFolder, key: APIKey, *bodies: dict[str, Any]) -> None:
    """Add a batch; each owner's has the same id, and all of them run."""
    owner = folder.owner(key.digest)
    lines = [
        {"custom_id": f"r{index}", "method": "POST", "url": PATH, "body": {"model": NAME, "prompt": "hello"} | body}
        for index, body in enumerate(bodies)
    ]
    source = owner.files.content("file-1")
    source.parent.mkdir(parents=True)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = int(time.time())
    batch = BatchRecord(
        id="batch_1",
        endpoint=PATH,
        input_file_id="file-1",
        completion_window="24h",
        created_at=now,
        expires_at=now + 600,
        key=key.digest,
        tenant=key.name,
    )
    owner.batches.save(batch.id, batch)


def ended(folder: FilesFolder, key: APIKey) -> BatchRecord:
    def found() -> BatchRecord:
        batch = folder.owner(key.digest).batches.find("batch_1")
        assert batch is not None
        return batch

    wait_for(lambda: found().status.is_final, "the batch to end")
    return found()


def test_the_limits_of_a_key_apply_to_its_batches(tmp_path: Path) -> None:
    folder = FilesFolder(tmp_path, 10**6)
    add_batch(folder, LIMITED, {"max_tokens": 4}, {"max_tokens": 99})
    add_batch(folder, REMOVED, {"max_tokens": 4})
    with front_end(keys=KeyTable([LIMITED]), files=folder) as front:
        limited, removed = ended(folder, LIMITED), ended(folder, REMOVED)
        assert front.metric("requests_rate_limited_total", key="limited", limit="tokens") == 1
    assert (limited.status, limited.completed, limited.failed) == ("completed", 1, 1)
    assert (removed.status, removed.completed) == ("failed", 0)
    assert "no longer valid" in str(removed.problem)


def test_a_batch_with_too_many_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n" * 4)
    assert len(scan(tmp_path / "lines", max_lines=4)) == 4
    with pytest.raises(InvalidParameter, match="more than 3 lines"):
        scan(tmp_path / "lines", max_lines=3)
