"""Standard streams and files that a command cannot use end it in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.errors import CorruptCheckpoint, InvalidParameter
from chairlift.loading.config_file import read_json_object
from chairlift.options import MAX_MIB, read_text
from chairlift.server.access import KeySources
from chairlift.server.batch.run import BatchRun
from chairlift.server.served_model import read_chat_template

ENDLESS, FULL = Path("/dev/zero"), Path("/dev/full")
# A command that prints long lines, without the time to import the others.
PRINTS = """
from chairlift.terminal.streams import guard_streams
guard_streams()
import sys
for number in range(20_000):
    print(f"line {number}")
print(repr(sys.stdin.read()), file=sys.stderr)
"""


def shell(redirections: str) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -c "$0" {redirections}'
    return subprocess.run(["bash", "-c", command, PRINTS], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("redirections", "status", "errors"),
    [
        ("<&- >/dev/null", 0, "''\n"),
        (">&- </dev/null", 0, "''\n"),
        ("2>&- >/dev/null </dev/null", 0, ""),
        ("2>/dev/full >/dev/null </dev/null", 0, ""),
        (">/dev/full </dev/null", 1, "error: cannot write to standard output: No space left on device\n"),
        ("</dev/null | head -1 >/dev/null; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_streams_that_are_closed_or_full_give_no_traceback(redirections: str, status: int, errors: str) -> None:
    done = shell(redirections)
    assert (done.returncode, done.stderr) == (status, errors)


def test_the_command_line_guards_its_streams() -> None:
    command = [sys.executable, "-m", "chairlift", "--version"]
    with FULL.open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: cannot write to standard output: No space left on device\n")


def test_files_that_never_end_are_refused(tmp_path: Path) -> None:
    for parameter, read in (
        ("config", lambda: read_text(ENDLESS, "config")),
        ("chat_template", lambda: read_chat_template(ENDLESS)),
        ("api_key_file", lambda: KeySources(file=ENDLESS).read()),
    ):
        with pytest.raises(InvalidParameter, match=f"{parameter}: '/dev/zero' is larger than {MAX_MIB} MiB"):
            read()
    with pytest.raises(CorruptCheckpoint, match="is larger than"):
        read_json_object(ENDLESS)
    (tmp_path / "lines").write_text("{}")
    for parameter, source, target in (("input", ENDLESS, tmp_path / "out"), ("output", tmp_path / "lines", FULL)):
        with pytest.raises(InvalidParameter, match=f"{parameter}: cannot .* it is not a regular file"):
            BatchRun(source, target, concurrency=1)
    (tmp_path / "text").write_bytes(b"a\r\nb\xff")
    with pytest.raises(InvalidParameter, match="it is not text in UTF-8"):
        read_text(tmp_path / "text", "file")
