"""An executor from outside the package runs under the real engine and scheduler."""

from __future__ import annotations

import subprocess
import sys

from chairlift import SamplingParams
from chairlift.core.events import RequestFinished, TextProduced, TokenProduced
from chairlift.core.executor import ExecutorCapabilities
from chairlift.core.integrity import check_quiescent
from chairlift.core.request import FinishReason
from tests.extending.pages import TOYS, page_shows
from tests.extending.toys.echo_executor import EchoExecutor, make_engine

TEXT = "one two three four five six seven eight nine ten"


def test_requests_get_their_own_prompts_back() -> None:
    engine = make_engine(TEXT)
    prompts = [engine.tokenizer.encode(" ".join(TEXT.split()[first:])) for first in range(10)]
    ids = [engine.submit(prompt, SamplingParams(max_tokens=2 * len(prompt)))[0] for prompt in prompts]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    text, endings = "", []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                tokens[event.request_id].append(event.token)
            elif isinstance(event, TextProduced) and event.request_id == ids[0]:
                text += event.text
            elif isinstance(event, RequestFinished):
                endings.append(event.ending.reason)
    assert list(tokens.values()) == [prompt * 2 for prompt in prompts]
    assert text.split() == 2 * TEXT.split()
    assert endings == [FinishReason.LENGTH] * len(prompts)
    check_quiescent(engine.scheduler)


def test_an_executor_gets_defaults_for_all_but_launch() -> None:
    executor = EchoExecutor()
    assert executor.capabilities == ExecutorCapabilities(steps_ahead=0, beam_search=False, max_drafts=None)
    assert not executor.prepare()
    executor.forget("unknown")


def test_the_file_runs_by_itself() -> None:
    run = subprocess.run([sys.executable, str(TOYS / "echo_executor.py")], capture_output=True, text=True, check=True)
    assert run.stdout.split() == 2 * ["a", "chairlift", "never", "stops"]


def test_the_page_shows_the_file() -> None:
    assert page_shows("executor.md", "echo_executor.py")
