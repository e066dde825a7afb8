"""Structured output and thinking budgets: states of open requests and token masks of steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from chairlift.core.request import Ending, FinishReason, Request
from chairlift.core.sampling.structure import Structure
from chairlift.errors import InvalidParameter
from chairlift.sampling.draw import Bits, TokenMasks
from chairlift.structured.compiler import BadStructure, GrammarCompiler, mask_words
from chairlift.text.reasoning import ReasoningTracker, ReasoningUse, Restriction
from chairlift.text.reasoning_formats.base import ReasoningFormat
from chairlift.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


@dataclass(frozen=True, slots=True)
class ThinkingBudgets:
    """Creates the state of each request with a thinking budget."""

    format: ReasoningFormat | None
    tokenizer: Tokenizer

    def state(self, request: Request) -> ThinkingState | None:
        """The state of a request; None if it has no budget or its prompt has ended the reasoning."""
        budget = request.params.thinking_token_budget
        if budget is None:
            return None
        tracker = ReasoningUse.after(request.prompt, self.format, self.tokenizer).tracker()
        return None if tracker is None else ThinkingState(tracker, budget)


class ThinkingState:
    """A request's position in its reasoning, which depends only on its output."""

    def __init__(self, tracker: ReasoningTracker, budget: int) -> None:
        self._first = tracker
        self._tracker = tracker.copy()
        self._num_tokens = 0
        self._budget = budget

    def restrictions(self, request: Request, drafts: Sequence[int]) -> list[Restriction | None]:
        """Return what the budget demands of the next token and of the token after each draft."""
        self._follow(request)
        restrictions = [self._tracker.restriction(self._budget)]
        ahead = self._tracker.copy() if drafts else self._tracker
        for draft in drafts:
            ahead.push(draft)
            restrictions.append(ahead.restriction(self._budget))
        return restrictions

    def _follow(self, request: Request) -> None:
        if request.num_output < self._num_tokens:  # tokens were removed
            self._tracker, self._num_tokens = self._first.copy(), 0
        for token in request.tokens[request.num_prompt + self._num_tokens :]:
            self._tracker.push(token)
        self._num_tokens = request.num_output


TOO_COMPLEX = "became too complex to follow during generation: simplify it"


class StructuredOutput:
    """Holds the grammar matcher and the thinking budget of each open request. The engine opens and closes requests; the
    runner gets masks.

    These states depend only on the request's output, so a preemption does not affect them.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, budgets: ThinkingBudgets | None = None) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._num_words = mask_words(vocab_size)
        self._compiling: dict[str, tuple[Structure, Future[LLMatcher]]] = {}  # The keys are request ids.
        self._states: dict[str, _GrammarState] = {}
        self._budgets = budgets
        self._thinking: dict[str, ThinkingState] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling: Future[TokenMasks] | None = None

    # ---- compiling -----------------------------------------------------------------------------------------------

    def compile(self, structure: Structure) -> None:
        """Compile a structure and wait for it; raises InvalidParameter."""
        _compiled(structure, self._compiler.compile(structure))

    def check(self, structure: Structure) -> None:
        """Start to compile a structure; raises InvalidParameter if a cached result shows that it is invalid."""
        future = self._start(structure)
        if future.done() and not structure.optional:
            _compiled(structure, future)

    def open(self, request: Request) -> None:
        """Start to compile the grammar of a request and to follow its reasoning."""
        structure = request.params.structure
        if structure is not None:
            self._compiling[request.id] = structure, self._start(structure)
        state = self._budgets.state(request) if self._budgets else None
        if state is not None:
            self._thinking[request.id] = state

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model writes the reasoning that budgets limit; None if it has none."""
        return self._budgets.format if self._budgets else None

    def _start(self, structure: Structure) -> Future[LLMatcher]:
        try:
            return self._compiler.compile(structure)
        except InvalidParameter as error:
            if not structure.optional:
                raise
            failed: Future[LLMatcher] = Future()
            failed.set_exception(BadStructure(error.problem))
            return failed

    def newly_compiled(self) -> list[tuple[str, Ending | None]]:
        """Return the requests whose grammars were compiled since the last call, with an ending if it failed."""
        compiled: list[tuple[str, Ending | None]] = []
        for request_id, (structure, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            ending = None
            try:
                self._states[request_id] = _GrammarState(_compiled(structure, future).deep_copy())
            except InvalidParameter as error:
                ending = Ending(FinishReason.ERROR, error.problem, error.parameter)
            except Exception as error:  # the compiler failed, for example to start a process
                problem = f"the grammar could not be compiled: {error}"
                ending = Ending(FinishReason.ERROR, problem, temporary=True)
            if structure.optional:
                ending = None
            compiled.append((request_id, ending))
        return compiled

    def wait_for_compiler(self, seconds: float) -> None:
        """Wait until a grammar is compiled, at most `seconds`; return at once if none is being compiled."""
        if self._compiling:
            wait([future for _, future in self._compiling.values()], seconds, return_when="FIRST_COMPLETED")

    def close(self, request_id: str) -> None:
        """Drop the state of a request, which may not have been admitted yet."""
        self._states.pop(request_id, None)
        self._thinking.pop(request_id, None)
        structure, _ = self._compiling.pop(request_id, (None, None))
        if structure is not None and all(structure != other for other, _ in self._compiling.values()):
            self._compiler.cancel(structure)

    def shut_down(self) -> None:
        self._compiler.shut_down()

    # ---- endings ------------------------------------------------------------------------------------------------

    def ending(self, request: Request) -> Ending | None:
        """Return the ending of a request whose grammar allows nothing after its last token, else None."""
        state = self._states.get(request.id)
        if state is None:
            return None
        state.follow(request)
        if state.matcher.is_error():
            structure = request.params.structure
            assert structure is not None
            if structure.optional:  # continue without it
                del self._states[request.id]
                return None
            return Ending(FinishReason.ERROR, TOO_COMPLEX, structure.parameter)
        return Ending(FinishReason.STOP) if state.matcher.is_stopped() else None

    # ---- masks ---------------------------------------------------------------------------------------------------

    def begin_masks(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> Future[TokenMasks] | None:
        """Start to compute, in another thread, the masks of the `requests` that have a grammar or have spent their
        thinking budget, or that need `min_tokens` after their optional grammar failed.

        A request has a row for its next token and one for the token after each of its drafts.
        """
        tasks: list[_MaskTask] = []
        row = 0
        for request, drafted in zip(requests, drafts, strict=True):
            if request.has_masks:
                task = self._task(request, row, tuple(drafted))
                tasks += [task] if task.needed else []
            row += 1 + len(drafted)
        if not tasks:
            return None
        self._wait_for_masks()
        for task in tasks:
            if task.state is not None:
                task.state.follow(task.request)
        self._filling = self._thread.submit(self._fill, tasks)
        return self._filling

    def _task(self, request: Request, row: int, drafts: tuple[int, ...]) -> _MaskTask:
        state, thinking = self._states.get(request.id), self._thinking.get(request.id)
        restrictions: list[Restriction | None] = [None] * (1 + len(drafts))
        if thinking is not None:
            restrictions = thinking.restrictions(request, drafts)
        suppressed: list[Bits | None] = [None] * (1 + len(drafts))
        dropped = state is None and request.params.structure is not None  # an optional grammar that failed
        if state is not None or (dropped and request.num_output < request.params.min_tokens):
            suppressed = [self._suppressed(request, ahead) for ahead in range(1 + len(drafts))]
        return _MaskTask(request, state, row, drafts, suppressed, restrictions)

    def _wait_for_masks(self) -> None:
        """Wait for the masks of an interrupted step: matchers are not thread-safe."""
        if self._filling is not None:
            wait([self._filling])

    def num_allowed(self, request: Request, drafts: Sequence[int]) -> int:
        """Return the number of leading draft tokens that the request's grammar allows; all without a grammar."""
        state = self._states.get(request.id)
        if state is None:
            return len(drafts)
        self._wait_for_masks()
        state.follow(request)
        return int(state.matcher.validate_tokens(list(drafts)))

    def _suppressed(self, request: Request, ahead: int) -> Bits | None:
        """Return the end tokens that min_tokens or ignore_eos bans `ahead` tokens from now."""
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

    def _fill(self, tasks: Sequence[_MaskTask]) -> TokenMasks:
        rows = [row for task in tasks for row in task.rows]
        allowed = np.zeros((len(rows), self._num_words), np.uint32)
        firsts = np.cumsum([0, *(len(task.rows) for task in tasks)]).tolist()
        targets = [(task.state.matcher, first) for task, first in zip(tasks, firsts, strict=False) if task.state]
        if targets:
            from llguidance.numpy import fill_next_token_bitmask_par

            fill_next_token_bitmask_par(self._executor, targets, allowed.view(np.int32))
        for task, first in zip(tasks, firsts, strict=False):
            masks = allowed[first : first + len(task.rows)]
            if task.state is not None:
                _suppress(masks[0], task.state.matcher, task.suppressed[0])
                _restrict(masks[0], task.restrictions[0])
                if task.drafts:
                    _fill_after_drafts(masks, task, task.state.matcher)
            if not task.has_grammar:
                masks[:] = ~np.uint32(0)
                for mask, suppressed, restriction in zip(masks, task.suppressed, task.restrictions, strict=True):
                    if suppressed is not None:
                        mask &= ~suppressed
                    _restrict(mask, restriction)
        return TokenMasks(rows, allowed)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()


@dataclass(frozen=True, slots=True)
class _MaskTask:
    """The masks to compute for one request: for its next token and for the token after each draft."""

    request: Request
    state: _GrammarState | None
    first_row: int
    drafts: tuple[int, ...]
    suppressed: list[Bits | None]  # one entry per row
    restrictions: list[Restriction | None]  # one entry per row

    @property
    def needed(self) -> bool:
        """Whether any token is excluded."""
        return self.state is not None or any(bits is not None for bits in (*self.suppressed, *self.restrictions))

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar applies; an optional one that has failed does not."""
        structure = self.request.params.structure
        optional = structure is not None and structure.optional
        return self.state is not None and not (optional and self.state.matcher.is_error())

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + 1 + len(self.drafts))


def _suppress(mask: Bits, matcher: LLMatcher, suppressed: Bits | None) -> None:
    """Remove tokens from a mask unless the grammar allows no others: output may end early but never break the
    grammar."""
    if matcher.is_error():
        mask[:] = 0
    elif suppressed is not None and (others := mask & ~suppressed).any():
        mask[:] = others


def _restrict(mask: Bits, restriction: Restriction | None) -> None:
    """Apply a thinking budget to a mask, unless nothing would be allowed: a grammar has priority."""
    if restriction is None:
        return
    others = np.full_like(mask, ~np.uint32(0) if restriction.forced is None else 0)
    token = restriction.banned if restriction.forced is None else restriction.forced
    assert token is not None
    others[token // 32] ^= np.uint32(1 << token % 32)
    if (others & mask).any():
        mask &= others


def _fill_after_drafts(masks: Bits, task: _MaskTask, matcher: LLMatcher) -> None:
    """Fill the masks after each draft: advance the matcher along the drafts, then roll it back. No mask is needed after
    a draft that is not allowed, since the mask before it excludes that draft."""
    from llguidance.numpy import fill_next_token_bitmask

    consumed = 0
    for index, draft in enumerate(task.drafts):
        allowed = masks[index, draft // 32] >> np.uint32(draft % 32) & 1
        if not allowed or matcher.is_stopped() or not matcher.consume_token(draft):
            break
        consumed += 1
        if not matcher.is_stopped():  # otherwise the request ends here
            fill_next_token_bitmask(matcher, masks.view(np.int32), index + 1)
            _suppress(masks[index + 1], matcher, task.suppressed[index + 1])
            _restrict(masks[index + 1], task.restrictions[index + 1])
    if consumed:
        matcher.rollback(consumed)


@dataclass(slots=True)
class _GrammarState:
    """A request's matcher and the number of output tokens that it has consumed."""

    matcher: LLMatcher
    _num_tokens: int = 0

    def follow(self, request: Request) -> None:
        """Advance the matcher to the end of the request's output, or roll it back if tokens were removed."""
        ahead = self._num_tokens - request.num_output
        if ahead > 0:
            self.matcher.rollback(ahead)
        elif ahead < 0:
            self.matcher.consume_tokens(list(request.tokens[ahead:]))
        self._num_tokens = request.num_output


def _compiled(structure: Structure, future: Future[LLMatcher]) -> LLMatcher:
    try:
        return future.result()
    except BadStructure as error:
        raise InvalidParameter(structure.parameter, str(error)) from None
