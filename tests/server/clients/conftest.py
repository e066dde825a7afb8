"""What all client libraries are compared with: the answers of the official client."""

from __future__ import annotations

import os

import pytest

from tests.server.clients.scenario import MESSAGES
from tests.server.running_server import NAME, RunningServer

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read when litellm is imported: no list from the network


@pytest.fixture(scope="session")
def expected(tool_server: RunningServer) -> str:
    """The greedy answer of 12 tokens to the question."""
    answer = tool_server.client().chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)
    return str(answer.choices[0].message.content)
