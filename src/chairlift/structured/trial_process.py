"""A process that compiles each grammar once, as a trial, before the engine process does.

llguidance limits its own work and rejects most grammars that are too expensive, but not all: some take minutes, some
recurse so deeply that the process crashes. Here that is harmless: the kernel kills this process at its time or memory
limit, and the next grammar gets a new one.
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
STACK = 1 << 20  # bytes; half of the engine's smallest stack, so that what fits here fits there
TOKENS = 24  # random tokens to generate with each grammar
MAX_LEXER_STATES = 20_000  # about 2 KB per state and request
ATTEMPTS = 2
# Sent by an administrator, or by the kernel when memory is exhausted: unrelated to the grammar.
EXTERNAL_KILLS = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """A model's tokens, as llguidance needs them."""

    tokens: list[bytes]
    markers: list[int]  # tokens that are not text, written as <tool_call> or <[151657]> in grammars
    eos_ids: list[int]  # There is one or more.

    def tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        wrapper: Any = _TokenizerWrapper(self)
        return LLTokenizer(wrapper, eos_token=self.eos_ids)


class _TokenizerWrapper:
    """The attributes that LLTokenizer reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.markers
        self.eos_token_id = vocabulary.eos_ids[0]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("only needed to force text to its canonical tokens, which is switched off")


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar. An invalid one does not raise: check `is_error()`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
    return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)


class TrialProcess:
    """The parent's handle on the process, which is started on first use. Not thread-safe, except for `close`."""

    def __init__(self, vocabulary: GrammarVocabulary, seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._terminate: Callable[[], Any] = lambda: None
        self._closed = False

    def problem(self, grammar: str) -> str | None:
        """Return the problem with a grammar; None if it can be used. If the process is killed from outside, the grammar
        is tried once more; if it is killed again, this raises TemporaryFailure."""
        for _ in range(ATTEMPTS):
            process = self._process or self._start()
            reply = _request(process, [grammar, self._seconds])
            if reply:
                problem: str | None = json.loads(reply)
                return problem
            self._process = None
            self._terminate()
            if process.returncode in (-signal.SIGPROF, -signal.SIGALRM):
                return f"takes more than {self._seconds:g} s to compile: simplify it"
            if process.returncode not in EXTERNAL_KILLS:
                return "is too complex to compile"
        raise TemporaryFailure("the process that tries grammars was killed")

    def close(self) -> None:
        """Refuse further grammars and fail the one in flight. May be called from any thread."""
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
        self._terminate = weakref.finalize(self, _terminate, process)
        if self._closed:  # `close` may have been called before the process existed
            process.kill()
        tokens = [token.decode("latin-1") for token in self._vocabulary.tokens]
        if not _request(process, asdict(self._vocabulary) | {"tokens": tokens}):
            self._process = None
            self._terminate()
            raise TemporaryFailure("the process that tries grammars could not be started")
        return process


def _request(process: subprocess.Popen[str], message: Any) -> str:
    """Send a message and return the reply, which is empty if the process is dead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(json.dumps(message), file=process.stdin, flush=True)
        return process.stdout.readline()
    except OSError:
        return ""


def _terminate(process: subprocess.Popen[str]) -> None:
    process.kill()  # has no effect if the process has exited
    with suppress(OSError), process:  # closes the pipes and waits for the exit
        pass


# ---- the child process -----------------------------------------------------------------------------------------------


def main() -> None:
    """Read a vocabulary and then grammars from stdin; write the problem with each grammar to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.stack_size(STACK)
    description = json.loads(sys.stdin.readline())
    tokens = [token.encode("latin-1") for token in description.pop("tokens")]
    tokenizer = GrammarVocabulary(tokens, **description).tokenizer()
    print("ready", flush=True)
    for line in sys.stdin:
        grammar, seconds = json.loads(line)
        _set_timers(seconds)
        reply = _run_on_small_stack(tokenizer, grammar)
        _set_timers(0)
        print(json.dumps(reply), flush=True)


def _set_timers(seconds: float) -> None:
    """Limit the CPU time, and the wall time to ten times that; signals end the process at the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)


def _run_on_small_stack(tokenizer: LLTokenizer, grammar: str) -> str | None:
    replies: list[str | None] = []
    thread = threading.Thread(target=lambda: replies.append(_try_out(tokenizer, grammar)))
    thread.start()
    thread.join()
    return replies[0]


def _try_out(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """Compile a grammar and generate some random tokens with it, since computing masks can be too expensive too."""
    matcher = make_matcher(tokenizer, grammar)
    rng = random.Random(0)
    for _ in range(TOKENS):
        if matcher.is_error():
            error: str = matcher.get_error()
            return error
        if matcher.is_stopped():
            break
        token = _random_set_bit(matcher.compute_bitmask(), rng)
        if token is not None:
            matcher.consume_token(token)
    return None


def _random_set_bit(mask: bytes, rng: random.Random) -> int | None:
    """Return a set bit of the first non-zero byte after a random position; listing all bits would take too long."""
    start = rng.randrange(len(mask))
    rotated = mask[start:] + mask[:start]
    rest = rotated.lstrip(b"\0")
    if not rest:
        return None
    index = (start + len(rotated) - len(rest)) % len(mask)
    return 8 * index + rng.choice([bit for bit in range(8) if rest[0] >> bit & 1])


if __name__ == "__main__":
    main()
