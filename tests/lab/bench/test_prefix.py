"""`bench prefix` on a tiny model: sessions have the right prompts, and caching finds the common prefixes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.core.events import Event, RequestQueued
from chairlift.errors import InvalidParameter
from chairlift_lab.bench.prefix import SCENARIOS, PrefixSettings, compare_prefix_caching
from chairlift_lab.common.engines import EngineMaker, Session, run_sessions
from chairlift_lab.common.workload import BenchRequest, TokenSource
from chairlift_lab.report.options import parse_names
from tests.tiny import write_tiny_checkpoint

SMALL = PrefixSettings(
    users=3, turns=3, system=20, message=7, documents=2, document=40, questions=5, agents=3, tools=64, steps=2, answer=5
)
DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def maker(folder: str) -> EngineMaker:
    return EngineMaker.load(folder, {"device": "cpu"})


def test_a_turn_repeats_the_whole_conversation(maker: EngineMaker) -> None:
    engine = maker.engine(kv_memory="4MiB")
    queued: list[int] = []

    def listen(events: Sequence[Event]) -> None:
        queued.extend(event.num_prompt for event in events if isinstance(event, RequestQueued))

    engine.subscribe(listen)
    session = Session((BenchRequest((5, 6, 7), 4), BenchRequest((8,), 2), BenchRequest((9, 9), 1)))
    measured = run_sessions(engine, [session])
    assert queued == [3, 3 + 4 + 1, 8 + 2 + 2]
    assert [len(times) for times in measured.token_times] == [4, 2, 1]
    assert measured.input_tokens == sum(queued)
    assert measured.arrivals is not None
    for before, came in zip(measured.token_times, measured.arrivals[1:], strict=False):
        assert came == pytest.approx(before[-1])


def test_requests_arrive_at_their_times(maker: EngineMaker) -> None:
    sessions = [Session((BenchRequest((5, 6), 2),)) for _ in range(3)]
    measured = run_sessions(maker.engine(kv_memory="4MiB"), sessions, arrivals=[0.0, 0.05, 0.1])
    assert measured.arrivals == [0.0, 0.05, 0.1]
    assert all(times[0] > came for times, came in zip(measured.token_times, measured.arrivals, strict=True))
    assert measured.seconds > 0.1


def test_caching_finds_common_prefixes(maker: EngineMaker) -> None:
    rows = compare_prefix_caching(maker, SMALL)
    combinations = [(row["scenario"], row["prefix_caching"]) for row in rows]
    assert combinations == [(s, c) for s in SCENARIOS for c in (False, True)]
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        assert off["hit_rate"] == 0
        assert on["hit_rate"] > 0.2
        assert on["input_tokens"] == off["input_tokens"]
        assert on["mean_batch_requests"] >= off["mean_batch_requests"]
    # Two later agents find the 64 tokens of tools, and the second call of all three what the first left in whole
    # blocks of 16: 64 tokens of tools, 7 of a task, 4 computed of an answer.
    assert rows[-1]["cached_tokens"] == 2 * 64 + 3 * 64


def test_every_key_is_documented(maker: EngineMaker) -> None:
    documented = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    (row, _) = compare_prefix_caching(maker, SMALL, scenarios=["rag"])
    assert set(row) | set(PrefixSettings.__dataclass_fields__) | set(maker.settings()) <= documented


def test_the_same_seed_gives_the_same_sessions() -> None:
    for make in SCENARIOS.values():
        first, same, other = (make(SMALL, TokenSource(range(50), seed)) for seed in ("a", "a", "b"))
        assert first == same != other


def test_invalid_settings_are_refused_by_name() -> None:
    with pytest.raises(InvalidParameter, match="turns"):
        PrefixSettings(turns=0)
    for text in ("", "magic", "rag,rag"):
        with pytest.raises(InvalidParameter, match="scenarios"):
            parse_names("scenarios", text, SCENARIOS)


def test_the_command(folder: str, tmp_path: Path) -> None:
    figures, picture = tmp_path / "a.json", tmp_path / "a.png"
    small = [f"--{name.replace('_', '-')}={getattr(SMALL, name)}" for name in PrefixSettings.__dataclass_fields__]
    outputs = ["--json", str(figures), "--plot", str(picture)]
    made = CliRunner().invoke(app, ["bench", "prefix", "--model", folder, "--device", "cpu", *small, *outputs])
    assert made.exit_code == 0, made.output
    assert made.output.count("on") >= 3
    assert len(json.loads(figures.read_text())["rows"]) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, ["bench", "prefix", "--kv-memory", "1GiB"])
    assert refused.exit_code == 2
    assert "--kv-memory" in refused.output
