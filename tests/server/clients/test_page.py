"""The Python blocks of docs/clients.md run as they are, apart from the address and the model's name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.server.running_server import NAME, RunningServer

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
BLOCKS = dict(re.findall(r"^## ([\w-]+)\n[^#]*?```python\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_every_library_has_a_block() -> None:
    assert set(BLOCKS) == {"openai", "anthropic", "litellm", "langchain", "pydantic-ai", "instructor", "ollama"}


@pytest.mark.parametrize("client", BLOCKS)
def test_a_block(tool_server: RunningServer, client: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = {"langchain": "langchain_openai"}.get(client, client.replace("-", "_"))
    pytest.importorskip(module, reason=f"{client} is not installed: pip install -e '.[clients]'")
    code = BLOCKS[client].replace("http://127.0.0.1:8000", tool_server.url).replace("smollm2-135m", NAME)
    exec(compile(code, f"{PAGE.name}: {client}", "exec"), {"__name__": client})
    assert capsys.readouterr().out.strip()
