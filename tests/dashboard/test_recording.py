"""`chairlift record`, and the files it writes."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.server.dashboard.page import RunSummary, compress, write_run
from tests.dashboard.frames import send_frames
from tests.dashboard.recorded import random_run
from tests.server.front_end import front_end, stay_silent


def test_record_writes_the_frames_that_a_page_gets(tmp_path: Path) -> None:
    out = tmp_path / "run.lift"
    with front_end(send_frames, api_keys=["sesame"]) as front:
        options = ["--url", front.url, "--seconds", "0.5", "--api-key", "sesame"]
        done = CliRunner().invoke(app, ["record", str(out), *options])
    assert done.exit_code == 0, done.output
    frames = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert frames[0]["t"] == "hello"
    assert "key" in {frame["t"] for frame in frames}


def test_record_fails_without_a_keyframe(tmp_path: Path) -> None:
    with front_end(stay_silent) as front:
        done = CliRunner().invoke(app, ["record", str(tmp_path / "run.lift"), "--url", front.url, "--seconds", "0.3"])
        assert done.exit_code == 2
        assert "the engine did not answer" in done.output
    done = CliRunner().invoke(app, ["record", str(tmp_path / "run.lift"), "--url", front.url])
    assert done.exit_code == 2
    assert "no server at" in done.output


@pytest.mark.parametrize("path", ["run.txt", "nowhere/run.lift"])
def test_record_refuses_paths_it_cannot_write(path: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["record", str(tmp_path / path)])
    assert done.exit_code == 2
    assert "out" in done.output


def test_a_run_is_small_and_equal_inside_a_page(tmp_path: Path) -> None:
    run = random_run(1)
    lines = [json.dumps(frame, separators=(",", ":")).encode() for frame in run.frames]
    found = RunSummary.of(lines)
    assert (found.steps, found.requests, found.lost) == (len(run.shapes), len(run.outputs), 0)
    assert len(compress(lines)) < 60 * len(run.shapes)
    write_run(tmp_path / "run.html", lines)
    page = (tmp_path / "run.html").read_text()
    inside = re.search(r'id="recording">([^<]+)<', page)
    assert inside is not None
    assert gzip.decompress(b64decode(inside[1])).splitlines() == lines
