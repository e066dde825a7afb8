"""All draft tokens of a draft head in one kernel call: a pass reads few weights, and returning to Python between two
passes would take as long as a pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.kernels.cpu.aligned import aligned
from chairlift.kernels.cpu.attention_work import AttentionWork, Pieces
from chairlift.kernels.cpu.compiling import FAST, compiled, compiled_and_kept, exp, widen
from chairlift.kernels.cpu.decoder import Buffers, Network, Step, decode_layer, store_layer
from chairlift.kernels.cpu.int8 import PackedWeight, Rows, multiply, round_row
from chairlift.kernels.cpu.layer_math import norm_row
from chairlift.kernels.cpu.threads import barrier, claim, nanoseconds


class HeadWeights(NamedTuple):
    net: Network  # one layer and the final norm
    joint: PackedWeight  # [hidden, features]; no panels if there is one feature
    mix: PackedWeight  # [hidden, 2 * hidden]
    head: PackedWeight  # [draft vocab, hidden]
    embedded: np.ndarray  # [draft vocab, hidden] bfloat16 as uint16: token embeddings of unit mean square


class KnownTokens(NamedTuple):
    """Inputs of the first pass: T known tokens of R requests."""

    step: Step  # the kernel fills its x
    embedded: np.ndarray  # [T, hidden] float32
    features: np.ndarray  # [T, n * hidden] float32: the target's hidden states before each token
    last_rows: np.ndarray  # [R] int64


class DraftedTokens(NamedTuple):
    """Inputs of the later passes: P draft positions of R requests, those with the most drafts first."""

    x: np.ndarray  # [R, hidden] float32, filled by the kernel
    cos: np.ndarray  # [P, R, pairs] float32
    sin: np.ndarray
    slots: np.ndarray  # [P, R] int64
    tables: np.ndarray  # [1, R, longest] int32
    work: AttentionWork  # It is the work of the last pass.
    lengths: np.ndarray  # [P, pieces] int64: lengths of the pieces at each position
    pieces: np.ndarray  # [P] int64: number of pieces at each position
    requests: np.ndarray  # [P] int64: number of requests at each position


class Choices(NamedTuple):
    """Outputs: the draft tokens of R requests, at most P + 1 each."""

    tokens: np.ndarray  # [R, P + 1] int64: row indices of the head
    levels: np.ndarray  # [R, P + 1] int64: confidence level of each, 0 to LEVELS - 1
    kept: np.ndarray  # [R] int64: number of draft tokens kept
    likely: np.ndarray  # [R] float32: probability that all drafts so far are accepted
    least: np.ndarray  # [2, R] float32: least probability to keep the last draft, and to make another
    chances: np.ndarray  # [R, LEVELS] float32: acceptance rate of each confidence level
    passes: np.ndarray  # [1] int64: number of passes
    clock: np.ndarray  # [2] int64: end of the first pass and of the last, in nanoseconds

    @classmethod
    def none_yet(cls, places: int, least: np.ndarray, chances: np.ndarray) -> Choices:
        count = least.shape[1]
        tokens, levels = np.zeros((2, count, places), dtype=np.int64)
        kept, likely = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.float32)
        passes, clock = np.ones(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
        return cls(tokens, levels, kept, likely, least, chances, passes, clock)

    @property
    def pass_seconds(self) -> float | None:
        """Seconds per pass after the first; None if there was only one."""
        later = int(self.passes[0]) - 1
        return float(self.clock[1] - self.clock[0]) / 1e9 / later if later else None


class DraftBuffers(NamedTuple):
    """Intermediate results for T tokens and R requests."""

    joined: np.ndarray  # [T, hidden] float32
    pairs: np.ndarray  # [T, 2 * hidden] float32
    states: np.ndarray  # [R, hidden] float32
    scores: np.ndarray  # [R, draft vocab] float32
    feature_rows: Rows
    pair_rows: Rows
    state_rows: Rows

    @classmethod
    def empty(cls, tokens: int, requests: int, hidden: int, features: int, draft_vocab: int) -> DraftBuffers:
        return cls(
            aligned((tokens, hidden), np.float32),
            aligned((tokens, 2 * hidden), np.float32),
            aligned((requests, hidden), np.float32),
            aligned((requests, draft_vocab), np.float32),
            Rows.empty(tokens, features),
            Rows.empty(tokens, 2 * hidden),
            Rows.empty(requests, hidden),
        )


@compiled_and_kept(FAST)
def store_keys_values(
    shared: Any, members: int, head: HeadWeights, known: KnownTokens, buffers: Buffers, scratch: DraftBuffers
) -> None:
    """Store keys and values of tokens without drafting. The head has one layer, so they do not depend on attention."""
    _mix(shared, members, head, known, scratch)
    store_layer(shared, members, head.net, 0, known.step, buffers)


@compiled_and_kept(FAST)
def draft(
    shared: Any,
    members: int,
    head: HeadWeights,
    known: KnownTokens,
    drafted: DraftedTokens,
    buffers: Buffers,
    scratch: DraftBuffers,
    choices: Choices,
) -> None:
    step, no_bias = known.step, np.empty(0, dtype=np.float32)
    _mix(shared, members, head, known, scratch)
    decode_layer(shared, members, head.net, 0, step, buffers, False)
    _choose(shared, members, head, step.x, known.last_rows, scratch, choices, 0)
    choices.clock[:] = nanoseconds()
    every = np.arange(drafted.x.shape[0])
    for place in range(drafted.slots.shape[0]):
        active, last = drafted.requests[place], drafted.pieces[place]
        if not _goes_on(choices, place + 1, active):
            return
        x, old = drafted.x[:active], drafted.work.pieces
        multiply(shared, scratch.pair_rows, active, head.mix, no_bias, False, x)
        barrier(shared, members)
        pieces = Pieces(
            old.rows[:last], old.sequences[:last], drafted.lengths[place, :last], old.starts[:last], old.counts[:last]
        )
        whole = drafted.work
        order = whole.order[:last]
        work = AttentionWork(pieces, whole.tiles, whole.partial, whole.several, order, whole.shared)
        cos, sin = drafted.cos[place : place + 1], drafted.sin[place : place + 1]
        slots, tables = drafted.slots[place : place + 1], drafted.tables
        rows = every[:active]
        later = Step(
            x, cos, sin, slots, step.keys, step.values, tables, step.places, work, step.tapped, rows, x, step.adapters
        )
        decode_layer(shared, members, head.net, 0, later, buffers, False)
        _choose(shared, members, head, x, rows, scratch, choices, place + 1)
        choices.passes[0] = place + 2
        choices.clock[1] = nanoseconds()


@compiled(FAST)
def _mix(shared: Any, members: int, head: HeadWeights, known: KnownTokens, scratch: DraftBuffers) -> None:
    """Compute the layer's input of known tokens."""
    step, count, no_bias = known.step, known.step.x.shape[0], np.empty(0, dtype=np.float32)
    joined = known.features
    if head.joint.numbers.shape[0] > 0:
        joined = scratch.joined
        _unit_and_round(shared, known.features, known.embedded.shape[1], head.net.eps, scratch.feature_rows)
        barrier(shared, members)
        multiply(shared, scratch.feature_rows, count, head.joint, no_bias, False, joined)
        barrier(shared, members)
    _pair_up(shared, known.embedded, joined, head.net.eps, scratch)
    barrier(shared, members)
    multiply(shared, scratch.pair_rows, count, head.mix, no_bias, False, step.x)
    barrier(shared, members)


@compiled(FAST)
def _goes_on(choices: Choices, place: int, active: int) -> bool:
    """Whether any of the first `active` requests needs a draft at `place`; the same on all threads."""
    likely = choices.likely[:active] >= choices.least[1, :active]
    return bool(np.any(likely & (choices.kept[:active] == place)))


@compiled(FAST)
def _unit_and_round(shared: Any, x: Any, size: int, eps: Any, rows: Rows) -> None:
    """Normalise each `size` elements of a row and quantize the row."""
    scaled = np.empty(x.shape[1], dtype=np.float32)
    while True:
        row = claim(shared, 1)
        if row >= x.shape[0]:
            return
        for first in range(0, x.shape[1], size):
            _unit(x[row, first : first + size], eps, scaled[first : first + size])
        round_row(scaled, rows, row)


@compiled(FAST)
def _pair_up(shared: Any, embedded: Any, states: Any, eps: Any, scratch: DraftBuffers) -> None:
    """Concatenate each token's embedding with the state before it, quantized for the mixing product."""
    hidden = embedded.shape[1]
    while True:
        row = claim(shared, 1)
        if row >= embedded.shape[0]:
            return
        _unit(embedded[row], eps, scratch.pairs[row, :hidden])
        _unit(states[row], eps, scratch.pairs[row, hidden:])
        round_row(scratch.pairs[row], scratch.pair_rows, row)


@compiled(FAST)
def _choose(
    shared: Any,
    members: int,
    head: HeadWeights,
    x: Any,
    chosen_rows: Any,
    scratch: DraftBuffers,
    choices: Choices,
    place: int,
) -> None:
    """Choose the most likely token after each row and prepare the input of the next pass."""
    count, hidden, net = chosen_rows.shape[0], x.shape[1], head.net
    while True:
        row = claim(shared, 1)
        if row >= count:
            break
        norm_row(x[chosen_rows[row]], net.final_norm, net.eps, scratch.states[row])
        round_row(scratch.states[row], scratch.state_rows, row)
    barrier(shared, members)
    multiply(shared, scratch.state_rows, count, head.head, np.empty(0, dtype=np.float32), False, scratch.scores)
    barrier(shared, members)
    while True:
        row = claim(shared, 1)
        if row >= count:
            break
        scores, best = scratch.scores[row], 0
        for token in range(scores.shape[0]):
            if scores[token] > scores[best]:
                best = token
        choices.tokens[row, place] = best
        _judge(scores, scores[best], choices, row, place)
        for i in range(hidden):
            scratch.pairs[row, i] = widen(head.embedded[best, i])
        _unit(scratch.states[row], net.eps, scratch.pairs[row, hidden:])
        round_row(scratch.pairs[row], scratch.pair_rows, row)
    barrier(shared, members)


@compiled(FAST)
def _judge(scores: Any, highest: Any, choices: Choices, row: int, place: int) -> None:
    """Rate the draft with the highest score, and keep it if all before it are kept and it is likely enough."""
    total = np.float32(0.0)
    for token in range(scores.shape[0]):
        total += exp(scores[token] - highest)
    levels = choices.chances.shape[1]
    level = max(0, min(levels - 1, int(np.float32(levels) / total)))  # NaN scores give a level in range, too.
    choices.levels[row, place] = level
    choices.likely[row] *= choices.chances[row, level]
    if choices.kept[row] == place and choices.likely[row] >= choices.least[0, row]:
        choices.kept[row] = place + 1


@compiled(FAST)
def _unit(values: Any, eps: Any, out: Any) -> None:
    """Scale to unit mean square."""
    squares = np.float32(0.0)
    for i in range(values.shape[0]):
        squares += values[i] * values[i]
    factor = np.float32(1.0) / np.sqrt(squares / np.float32(values.shape[0]) + eps)
    for i in range(values.shape[0]):
        out[i] = values[i] * factor
