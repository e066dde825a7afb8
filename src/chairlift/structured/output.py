"""Structured output: every open request's place in its grammar, and the masks that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from chairlift.core.request import Ending, FinishReason, Request
from chairlift.core.structure import Structure
from chairlift.errors import InvalidParameter
from chairlift.sampling.token_masks import Bits, TokenMasks
from chairlift.structured.compiler import GrammarCompiler, mask_words
from chairlift.structured.grammar_source import BadStructure

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

OUTGROWN = "became too complex to follow while the answer was written: simplify it"


class MaskJob:
    """Masks that are being computed in another thread."""

    def __init__(self, rows: list[int], filling: Future[Bits]) -> None:
        self._rows = rows
        self._filling = filling

    def wait(self) -> TokenMasks:
        return TokenMasks(self._rows, self._filling.result())


class StructuredOutput:
    """Shared by the engine, which opens, follows and closes requests, and the runner, which asks for masks.

    A request's matcher depends on nothing but its output, so preemption does not touch it.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._num_words = mask_words(vocab_size)
        self._compiling: dict[str, tuple[Structure, Future[LLMatcher]]] = {}  # by request id
        self._places: dict[str, _Place] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling: Future[Bits] | None = None

    # ---- compiling -----------------------------------------------------------------------------------------------

    def compile(self, structure: Structure) -> None:
        """Compile and wait for it; raise if it cannot be done."""
        _outcome(structure, self._compiler.compile(structure))

    def check(self, structure: Structure) -> None:
        """Start to compile, without waiting; raise if it is already known that it cannot be done."""
        future = self._compiler.compile(structure)
        if future.done():
            _outcome(structure, future)

    def open(self, request: Request) -> None:
        structure = request.params.structure
        assert structure is not None
        self._compiling[request.id] = structure, self._compiler.compile(structure)

    def newly_compiled(self) -> list[tuple[str, Ending | None]]:
        """The requests whose grammars were compiled since the last call; with an ending if that failed."""
        found: list[tuple[str, Ending | None]] = []
        for request_id, (structure, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            ending = None
            try:
                self._places[request_id] = _Place(_outcome(structure, future).deep_copy())
            except InvalidParameter as error:
                ending = Ending(FinishReason.ERROR, error.problem, error.parameter)
            except Exception as error:  # the compiler itself failed: no processes left, say
                problem = f"the grammar could not be compiled: {error}"
                ending = Ending(FinishReason.ERROR, problem, temporary=True)
            found.append((request_id, ending))
        return found

    def wait_for_compiler(self, seconds: float) -> None:
        """Rest for so long, or until a grammar is compiled. Does nothing if none is awaited."""
        if self._compiling:
            wait([future for _, future in self._compiling.values()], seconds, return_when="FIRST_COMPLETED")

    def close(self, request_id: str) -> None:
        """The request is over, whether or not it ever boarded."""
        self._places.pop(request_id, None)
        structure, _ = self._compiling.pop(request_id, (None, None))
        if structure is not None and all(structure != other for other, _ in self._compiling.values()):
            self._compiler.give_up(structure)

    def shut_down(self) -> None:
        self._compiler.shut_down()

    # ---- following -----------------------------------------------------------------------------------------------

    def ending(self, request: Request) -> Ending | None:
        """Follow a request to its last token; how it ends, if the grammar can go no further."""
        place = self._places.get(request.id)
        if place is None:
            return None
        place.follow(request)
        if place.matcher.is_error():
            structure = request.params.structure
            return Ending(FinishReason.ERROR, OUTGROWN, structure.parameter if structure else None)
        return Ending(FinishReason.STOP) if place.matcher.is_stopped() else None

    # ---- masks ---------------------------------------------------------------------------------------------------

    def begin_masks(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]] | None = None) -> MaskJob | None:
        """Start to compute the masks of those among `requests` that have a grammar.

        A request has a row for its next token and one for the token after each of its drafts, if it has any.
        """
        tasks: list[_MaskTask] = []
        row = 0
        for request, guesses in zip(requests, drafts or [()] * len(requests), strict=True):
            place = self._places.get(request.id)
            if place is not None:
                held_back = [self._held_back(request, ahead) for ahead in range(1 + len(guesses))]
                tasks.append(_MaskTask(request, place, row, tuple(guesses), held_back))
            row += 1 + len(guesses)
        if not tasks:
            return None
        self._rest_of_masks()
        for task in tasks:
            task.place.follow(task.request)
        self._filling = self._thread.submit(self._fill, tasks)
        return MaskJob([row for task in tasks for row in task.rows], self._filling)

    def _rest_of_masks(self) -> None:
        """Those of a step that was interrupted: matchers are used by one thread at a time."""
        if self._filling is not None:
            wait([self._filling])

    def num_allowed(self, request: Request, drafts: Sequence[int]) -> int:
        """How many of these the grammar would let follow the request's output; all if it has none."""
        place = self._places.get(request.id)
        if place is None:
            return len(drafts)
        self._rest_of_masks()
        place.follow(request)
        return int(place.matcher.validate_tokens(list(drafts)))

    def _held_back(self, request: Request, ahead: int) -> Bits | None:
        """Tokens that would end the request, where the caller does not want it to end yet; `ahead` tokens from now."""
        params = request.params
        early = request.num_output + ahead < params.min_tokens
        ends = [*(request.eos_ids if early or params.ignore_eos else ()), *(params.stop_ids if early else ())]
        if not ends:
            return None
        bits = np.zeros(self._num_words, np.uint32)
        for token in ends:
            if token < self._vocab_size:
                bits[token // 32] |= np.uint32(1 << token % 32)
        return bits

    def _fill(self, tasks: Sequence[_MaskTask]) -> Bits:
        from llguidance.numpy import fill_next_token_bitmask_par

        allowed = np.zeros((sum(len(task.rows) for task in tasks), self._num_words), np.uint32)
        firsts = np.cumsum([0, *(len(task.rows) for task in tasks)]).tolist()
        targets = [(task.place.matcher, first) for task, first in zip(tasks, firsts, strict=False)]
        fill_next_token_bitmask_par(self._executor, targets, allowed.view(np.int32))
        for task, first in zip(tasks, firsts, strict=False):
            masks = allowed[first : first + len(task.rows)]
            _hold_back(masks[0], task.place.matcher, task.held_back[0])
            if task.drafts:
                _fill_behind_drafts(masks, task)
        return allowed

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()


@dataclass(frozen=True, slots=True)
class _MaskTask:
    """The masks of one request: of its next token, and of the one after each of its drafts."""

    request: Request
    place: _Place
    first_row: int
    drafts: tuple[int, ...]
    held_back: list[Bits | None]  # for each of them

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + 1 + len(self.drafts))


def _hold_back(mask: Bits, matcher: LLMatcher, held: Bits | None) -> None:
    if matcher.is_error():
        mask[:] = 0
    elif held is not None and (others := mask & ~held).any():
        mask[:] = others  # else there is nothing left to say: better to end than to break the grammar


def _fill_behind_drafts(masks: Bits, task: _MaskTask) -> None:
    """Walk the matcher along the drafts, and back. Behind a draft that is not allowed nothing is asked for any more:
    the mask before it keeps it from being chosen."""
    from llguidance.numpy import fill_next_token_bitmask

    matcher, walked = task.place.matcher, 0
    for index, draft in enumerate(task.drafts):
        possible = masks[index, draft // 32] >> np.uint32(draft % 32) & 1
        if not possible or matcher.is_stopped() or not matcher.consume_token(draft):
            break
        walked += 1
        if not matcher.is_stopped():  # else the request ends here
            fill_next_token_bitmask(matcher, masks.view(np.int32), index + 1)
            _hold_back(masks[index + 1], matcher, task.held_back[index + 1])
    if walked:
        matcher.rollback(walked)


class _Place:
    """Where in its grammar a request is."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self._num_tokens = 0

    def follow(self, request: Request) -> None:
        """Bring the matcher to the end of the request's output: forwards, or back if tokens were taken from it."""
        ahead = self._num_tokens - request.num_output
        if ahead > 0:
            self.matcher.rollback(ahead)
        elif ahead < 0:
            self.matcher.consume_tokens(list(request.tokens[ahead:]))
        self._num_tokens = request.num_output


def _outcome(structure: Structure, future: Future[LLMatcher]) -> LLMatcher:
    try:
        return future.result()
    except BadStructure as error:
        raise InvalidParameter(structure.parameter, str(error)) from None
