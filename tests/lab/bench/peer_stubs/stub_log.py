"""Where the stubs of the peers' packages write how they were called: lines of JSON in the file PEER_STUB_LOG."""

from __future__ import annotations

import json
import os
from typing import Any


def log(**content: Any) -> None:
    with open(os.environ["PEER_STUB_LOG"], "a", encoding="utf-8") as file:
        file.write(json.dumps(content, default=vars) + "\n")
