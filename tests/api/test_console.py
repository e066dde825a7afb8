"""Output on the terminal."""

from __future__ import annotations

import errno
import io
import logging
import subprocess
import sys
from typing import Any

import pytest

from chairlift.core.events import RequestFinished, TokenProduced
from chairlift.core.request import Ending, FinishReason
from chairlift.errors import ChairliftError
from chairlift.terminal.answers import AnswerMeter
from chairlift.terminal.console import note, show_error, show_log, write_text


def test_a_model_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        monkeypatch.setattr(sys, "stdout", stream)
        write_text("a\x1b[31m\tb\n\x07é\x9bc")
    assert terminal.getvalue() == "a[31m\tb\néc"
    assert pipe.getvalue() == "a\x1b[31m\tb\n\x07é\x9bc"


@pytest.mark.parametrize("show", [note, show_error])
def test_an_error_message_cannot_control_the_terminal(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    show("unexpected tensor \x1b]0;pwned\x07")
    shown = capsys.readouterr().err
    assert "unexpected tensor ]0;pwned" in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_a_full_disk_behind_the_log_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    log = logging.getLogger("chairlift")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    show_log(quiet=True)
    monkeypatch.setattr(sys, "stderr", Full())
    log.warning("a request failed")


def test_a_failed_answer_is_an_error() -> None:
    meter = AnswerMeter()
    meter([RequestFinished(1.0, "a", Ending(FinishReason.STOP))])
    meter.check()
    meter([RequestFinished(1.0, "a", Ending(FinishReason.ERROR, "no finite scores"))])
    with pytest.raises(ChairliftError, match="no finite scores"):
        meter.check()


def test_the_limit_that_ended_an_answer_is_named() -> None:
    def ending(max_tokens: int | None) -> str:
        meter = AnswerMeter(max_tokens)
        meter([TokenProduced(1.0, "a", 0, None), RequestFinished(1.0, "a", Ending(FinishReason.LENGTH))])
        return meter.cut_off

    assert ending(1) == "stopped after 1 token (max_tokens)"
    assert ending(2) == ending(None) == "stopped at the end of the context"


def test_a_terminal_without_utf8_still_gets_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    program = "import chairlift.__main__ as program; from chairlift.cli import main; "
    program += "main.app = lambda **options: print('na\u00efve'); program.main()"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"na?ve\n"
