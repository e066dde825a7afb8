"""Compile structures to grammar matchers, outside the engine's loop and within limits."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from chairlift.core.sampling.structure import Structure, StructureKind
from chairlift.errors import InvalidParameter
from chairlift.structured.trial_process import GrammarVocabulary, TrialProcess, make_matcher
from chairlift.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_DEPTH = 64  # nesting depth of a schema

# Between two tokens of JSON: nothing, a space, or a line break with indentation. With unbounded white space, a small
# model could generate nothing else.
_JSON_OPTIONS = {"whitespace_pattern": r"[ ]|\n[ ]{0,20}", "coerce_one_of": True}

# Without this, llguidance forces text without alternatives to its canonical tokens, in time proportional to the text:
# seconds per token for a{100000}. Must come last, so that it is not overridden.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


class BadStructure(ValueError):
    """A structure is invalid; the message is shown to the client."""


def grammar_of(structure: Structure, eos_ids: Sequence[int] = ()) -> str:
    """Return the grammar of a structure; raises BadStructure. No token of `eos_ids` may precede the structure."""
    try:
        return (_rules_after(structure, eos_ids) if structure.before else _rules(structure)) + _NO_FORCING
    except RecursionError:
        raise BadStructure("is nested too deeply") from None


def _rules_after(structure: Structure, eos_ids: Sequence[int]) -> str:
    """The rules of a structure that other output precedes: nested, so that no names collide."""
    ends = "".join(f",{token}" for token in eos_ids)
    before = re.sub(r"<\[\^([\d,]+)\]>", rf"<[^\g<1>{ends}]>", structure.before)
    return f"start: before structure\n{before}\nstructure: %lark {{\n{_rules(structure)}\n}}"


def _rules(structure: Structure) -> str:
    match structure.kind:
        case StructureKind.JSON_OBJECT:
            return _json_rule({"type": "object"})
        case StructureKind.JSON_SCHEMA:
            return _json_rule(_schema(structure.text))
        case StructureKind.REGEX:
            from llguidance import regex_to_lark

            return f"start: /{regex_to_lark(structure.text, 'd')}/"  # d: \d matches 0 to 9 only
        case StructureKind.CHOICE:
            # One terminal is much faster than a rule with many alternatives.
            choices = (json.dumps(choice, ensure_ascii=False) for choice in _choices(structure.text))
            return "start: CHOICE\nCHOICE: " + " | ".join(choices)
        case StructureKind.GRAMMAR:
            return _lark(structure.text)


def _json_rule(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _schema(text: str) -> dict[str, Any]:
    schema = _parsed(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise BadStructure("a JSON schema must be an object" if schema is not False else "the schema allows nothing")
    if _depth(schema) > MAX_DEPTH:
        raise BadStructure(f"the schema is nested more than {MAX_DEPTH} levels deep")
    if "x-guidance" in schema:
        raise BadStructure("x-guidance is not a keyword of JSON schemas")
    return schema


def _choices(text: str) -> list[str]:
    choices = _parsed(text)
    if not isinstance(choices, list) or not choices:
        raise BadStructure("must be a list with at least one choice")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise BadStructure("choices must be non-empty strings")
    return choices


def _lark(text: str) -> str:
    if not re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE):
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises exceptions of any type
        raise BadStructure(f"is not valid GBNF: {error}") from None
    return lark


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadStructure(f"is not valid JSON: {error}") from None


def _depth(value: Any) -> int:
    """Return the nesting depth of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits on compilation, beside those on length (core/sampling/structure.py) and depth."""

    seconds: float = 3.0  # The limit of one compilation.
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
        self._trials: dict[int, TrialProcess] = {}  # The keys are thread ids.

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
