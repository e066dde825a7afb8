"""Compile structures to grammar matchers, outside the engine's loop and within limits."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

from chairlift.core.sampling.structure import Structure, StructureKind
from chairlift.errors import InvalidParameter
from chairlift.structured.grammar_source import BadStructure, grammar_of
from chairlift.structured.trial_process import GrammarVocabulary, TrialProcess, make_matcher
from chairlift.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits on compilation. Limits on length and depth are in core/sampling/structure.py and grammar_source.py."""

    seconds: float = 3.0  # per compilation
    cached: int = 128  # number of cached grammars
    cached_characters: int = 4 << 20  # total length of their sources
    workers: int = 2  # threads


GENERATED = ("tools", "response_format")  # parameters whose grammars the client did not write


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask: one bit for each token, and at least one more."""
    return vocab_size // 32 + 1


class GrammarCompiler:
    """Compiles structures in worker threads. Must be called from one thread only.

    Compiled grammars and the errors of invalid ones are kept in an LRU cache.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Iterable[int],
        limits: GrammarLimits = GrammarLimits(),
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(token for token in eos_ids if token < vocab_size)
        self._limits = limits
        self._cache: OrderedDict[Structure, Future[LLMatcher]] = OrderedDict()
        self._workers = ThreadPoolExecutor(limits.workers, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._trials: dict[int, TrialProcess] = {}  # by thread id

    def compile(self, structure: Structure) -> Future[LLMatcher]:
        """Return the future of a matcher at the start of the grammar, to be copied. Its error is BadStructure if the
        structure is invalid."""
        if self._unsupported is not None:
            raise InvalidParameter(structure.parameter, self._unsupported)
        future = self._cache.get(structure)
        if future is None or _may_be_retried(future):
            future = self._cache[structure] = self._workers.submit(self._compile, structure)
            self._evict()
        self._cache.move_to_end(structure)
        return future

    def cancel(self, structure: Structure) -> None:
        """Cancel a compilation that has not started."""
        future = self._cache.get(structure)
        if future is not None and future.cancel():
            del self._cache[structure]

    def shut_down(self) -> None:
        """Stop without waiting for compilations in flight."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for trial in self._trials.values():
                trial.close()

    @cached_property
    def _unsupported(self) -> str | None:
        """Return why this model or installation does not support structured output; None if it does."""
        if find_spec("llguidance") is None:
            return "structured output needs the llguidance package, which is not installed"
        if not self._tokenizer.has_token_bytes:
            return "the text of this model's tokens depends on their neighbours, which no grammar can follow"
        return None

    def _evict(self) -> None:
        characters = sum(len(structure.text) for structure in self._cache)
        while len(self._cache) > self._limits.cached or characters > self._limits.cached_characters:
            structure, _ = self._cache.popitem(last=False)
            characters -= len(structure.text)

    # ---- in the worker threads -----------------------------------------------------------------------------------

    def _compile(self, structure: Structure) -> LLMatcher:
        grammar = grammar_of(structure, self._eos_ids)
        problem = self._trial().problem(grammar)
        if problem is not None:
            raise BadStructure(_readable(problem, structure))
        with self._lock:
            tokenizer = self._ll_tokenizer
        matcher = make_matcher(tokenizer, grammar)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise BadStructure(_readable(matcher.get_error(), structure))
        if not int.from_bytes(mask, "little") & ((1 << self._vocab_size) - 1):
            raise BadStructure("allows no text that this model's tokens can spell")
        return matcher

    def _trial(self) -> TrialProcess:
        """Return the trial process of this thread. Each thread has one, so that a slow grammar does not delay the
        others."""
        with self._lock:
            thread = threading.get_ident()
            if thread not in self._trials:
                self._trials[thread] = TrialProcess(self._vocabulary, self._limits.seconds)
            return self._trials[thread]

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        tokens = [self._tokenizer.token_bytes(token) for token in range(self._vocab_size)]
        padding = [b""] * (32 * mask_words(self._vocab_size) - len(tokens))  # ids without text are never allowed
        markers = sorted(token for token in self._tokenizer.marker_ids if token < self._vocab_size)
        # llguidance requires an EOS token; for a model without one, use an id that cannot be sampled.
        return GrammarVocabulary(tokens + padding, markers, self._eos_ids or [self._vocab_size])

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer()


def _may_be_retried(future: Future[LLMatcher]) -> bool:
    """Return whether the compilation failed for a reason other than the structure."""
    return future.done() and future.exception() is not None and not isinstance(future.exception(), BadStructure)


def _readable(error: str, structure: Structure) -> str:
    """Remove what llguidance adds to its message: the whole source, and positions in generated source."""
    lines = error.replace("<non-verbose/>", "").strip().splitlines() or ["cannot be compiled"]
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", lines[0])
    message = lines[0][place.end() if place else 0 :].removeprefix("failed to compile JSON schema: ").strip()
    cause = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if cause is not None:  # the first line quotes the whole regular expression
        message = f"a regular expression is not valid: {cause}"
    if place and structure.kind is StructureKind.GRAMMAR and not structure.parameter.startswith(GENERATED):
        message = f"line {place[1]}, column {place[2]}: {message}"
    return message[:300]
