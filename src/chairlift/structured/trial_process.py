"""A process in which grammars are tried out before the engine compiles them.

llguidance counts its work and gives up in time on most grammars that are too much, but not on all: some take minutes,
some recurse so deeply that the process dies. Here that costs nothing. The kernel ends the process when its time or its
memory is used up, and the next grammar gets a new one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from chairlift.errors import TemporaryFailure

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MEMORY = 4 << 30  # bytes of address space
STACK = 1 << 20  # half of what the smallest stack in the engine has: what passes here has room there
TOKENS = 24  # how far a grammar is followed
MAX_LEXER_STATES = 20_000  # of about 2 KB, and every request has its own
TRIES = 2
ACCIDENTS = (-signal.SIGKILL, -signal.SIGTERM)  # by an administrator, or by the kernel when others use up the memory


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What llguidance must know about a model's tokens."""

    tokens: list[bytes]
    marks: list[int]  # tokens that are no text; grammars name them as <tool_call> or <[151657]>
    ends: list[int]  # tokens that end a text, at least one

    def tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        wrapper: Any = _Wrapper(self)
        return LLTokenizer(wrapper, eos_token=self.ends)


class _Wrapper:
    """The attributes that LLTokenizer reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.marks
        self.eos_token_id = vocabulary.ends[0]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("only forcing text to its canonical tokens would need this, and that is off")


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Never raises for a bad grammar: ask `is_error()`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
    return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)


class Trial:
    """The parent's end. Used by one thread at a time; starts the process when it is needed."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], Any] = lambda: None
        self._closed = False

    def problem(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None if it can be used. An accident is no fault of the grammar: it is tried
        once more, and if that is not enough, this raises."""
        for _ in range(TRIES):
            process = self._process or self._start()
            reply = _ask(process, [grammar, self._seconds])
            if reply:
                problem: str | None = json.loads(reply)
                return problem
            self._process = None
            self._end()
            if process.returncode in (-signal.SIGPROF, -signal.SIGALRM):
                return f"takes more than {self._seconds:g} s to compile: simplify it"
            if process.returncode not in ACCIDENTS:
                return "is too complex to compile"
        raise TemporaryFailure("the process that tries grammars was killed")

    def close(self) -> None:
        """From any thread: nothing more is tried, and what is being tried fails."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[str]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._end = weakref.finalize(self, _end, process)
        if self._closed:  # perhaps too early for `close` to see this process
            process.kill()
        tokens = [token.decode("latin-1") for token in self._vocabulary.tokens]
        if not _ask(process, asdict(self._vocabulary) | {"tokens": tokens}):
            self._process = None
            self._end()
            raise TemporaryFailure("the process that tries grammars could not be started")
        return process


def _ask(process: subprocess.Popen[str], message: Any) -> str:
    """The process's reply, or nothing if it is dead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(json.dumps(message), file=process.stdin, flush=True)
        return process.stdout.readline()
    except OSError:
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()  # does nothing if it has ended by itself
    with suppress(OSError), process:  # closes the pipes and waits
        pass


# ---- the process itself ----------------------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.stack_size(STACK)
    description = json.loads(sys.stdin.readline())
    tokens = [token.encode("latin-1") for token in description.pop("tokens")]
    tokenizer = Vocabulary(tokens, **description).tokenizer()
    print("ready", flush=True)
    for line in sys.stdin:
        grammar, seconds = json.loads(line)
        _set_timers(seconds)
        reply = _on_a_small_stack(tokenizer, grammar)
        _set_timers(0)
        print(json.dumps(reply), flush=True)


def _set_timers(seconds: float) -> None:
    """Their signals end this process. What counts is the time that it computes, unless it hardly gets to."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)


def _on_a_small_stack(tokenizer: LLTokenizer, grammar: str) -> str | None:
    replies: list[str | None] = []
    thread = threading.Thread(target=lambda: replies.append(_try_out(tokenizer, grammar)))
    thread.start()
    thread.join()
    return replies[0]


def _try_out(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """Compile it and follow it for some tokens, whichever they are: masks can be too much work too."""
    matcher = make_matcher(tokenizer, grammar)
    rng = random.Random(0)
    for _ in range(TOKENS):
        if matcher.is_error():
            error: str = matcher.get_error()
            return error
        if matcher.is_stopped():
            break
        token = _some_set_bit(matcher.compute_bitmask(), rng)
        if token is not None:
            matcher.consume_token(token)
    return None


def _some_set_bit(mask: bytes, rng: random.Random) -> int | None:
    """A bit of the first byte with one, from a random byte on: vocabularies are too large to list all of them."""
    start = rng.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    found = turned.lstrip(b"\0")
    if not found:
        return None
    place = (start + len(turned) - len(found)) % len(mask)
    return 8 * place + rng.choice([bit for bit in range(8) if found[0] >> bit & 1])


if __name__ == "__main__":
    main()
