"""All guesses of a draft head in one call: each is a pass over few weights, and leaving the kernel between two of them
would take as long as the pass itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.kernels.cpu.aligned import aligned
from chairlift.kernels.cpu.attention_work import Pieces, Work
from chairlift.kernels.cpu.decoder import Buffers, Network, Step, decode_layer, norm_row, store_layer
from chairlift.kernels.cpu.int8 import PackedWeight, Rows, multiply, round_row
from chairlift.kernels.cpu.scalar_math import FAST, compiled, compiled_and_kept, exp, widen
from chairlift.kernels.cpu.threads import claim, meet, nanoseconds


class HeadWeights(NamedTuple):
    net: Network  # one layer, and the norm behind it
    joint: PackedWeight  # [hidden, features]; without panels: there is nothing to join
    mix: PackedWeight  # [hidden, 2 * hidden]
    head: PackedWeight  # [draft vocab, hidden]
    embedded: np.ndarray  # [draft vocab, hidden] bfloat16 as uint16: the tokens to guess, each of mean square one


class Certain(NamedTuple):
    """What the first guesses are made from: T tokens of R requests."""

    step: Step  # its x is filled here
    embedded: np.ndarray  # [T, hidden] float32
    features: np.ndarray  # [T, n * hidden] float32: what the target knew before each token
    last_rows: np.ndarray  # [R] int64


class Guessed(NamedTuple):
    """What the other guesses are made from: the P before them, of R requests. Those that want most come first."""

    x: np.ndarray  # [R, hidden] float32, filled here
    cos: np.ndarray  # [P, R, pairs] float32
    sin: np.ndarray
    slots: np.ndarray  # [P, R] int64
    tables: np.ndarray  # [R, longest] int32
    work: Work  # of the last guesses
    lengths: np.ndarray  # [P, pieces] int64: as the pieces of that have them, at each place
    pieces: np.ndarray  # [P] int64: how many pieces are wanted at each place
    requests: np.ndarray  # [P] int64: and by how many of the first requests


class Choices(NamedTuple):
    """What is guessed for R requests, P + 1 places at most: no more places than one of them is likely to need."""

    tokens: np.ndarray  # [R, P + 1] int64, as rows of the head
    levels: np.ndarray  # [R, P + 1] int64: how sure the head is of each, from 0 to LEVELS - 1
    kept: np.ndarray  # [R] int64: how many of each request's guesses are likely enough
    likely: np.ndarray  # [R] float32: the chance that all guesses so far are right
    least: np.ndarray  # [2, R] float32: what that must be for the last to be kept, and for another to be made
    chances: np.ndarray  # [R, LEVELS] float32: how often a guess of each level is right
    passes: np.ndarray  # [1] int64: places at which guesses were made
    clock: np.ndarray  # [2] int64: when the first guesses were done, and when all were, in nanoseconds

    @classmethod
    def none_yet(cls, places: int, least: np.ndarray, chances: np.ndarray) -> Choices:
        count = least.shape[1]
        tokens, levels = np.zeros((2, count, places), dtype=np.int64)
        kept, likely = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.float32)
        passes, clock = np.ones(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
        return cls(tokens, levels, kept, likely, least, chances, passes, clock)

    @property
    def pass_seconds(self) -> float | None:
        """What each guess but the first took; None if there was no other."""
        later = int(self.passes[0]) - 1
        return float(self.clock[1] - self.clock[0]) / 1e9 / later if later else None


class Room(NamedTuple):
    """For what the pieces of work hand on: T tokens, R requests."""

    joined: np.ndarray  # [T, hidden] float32
    pairs: np.ndarray  # [T, 2 * hidden] float32
    states: np.ndarray  # [R, hidden] float32
    scores: np.ndarray  # [R, draft vocab] float32
    feature_rows: Rows
    pair_rows: Rows
    state_rows: Rows

    @classmethod
    def empty(cls, tokens: int, requests: int, hidden: int, features: int, draft_vocab: int) -> Room:
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
def remember(shared: Any, members: int, head: HeadWeights, certain: Certain, buffers: Buffers, room: Room) -> None:
    """Only the keys and values of tokens that nothing is guessed behind. The head has one layer, so that they hang on
    the tokens by themselves, and not on what those attend to."""
    _mix(shared, members, head, certain, room)
    store_layer(shared, members, head.net, 0, certain.step, buffers)


@compiled_and_kept(FAST)
def guess(
    shared: Any,
    members: int,
    head: HeadWeights,
    certain: Certain,
    guessed: Guessed,
    buffers: Buffers,
    room: Room,
    choices: Choices,
) -> None:
    step, no_bias = certain.step, np.empty(0, dtype=np.float32)
    _mix(shared, members, head, certain, room)
    decode_layer(shared, members, head.net, 0, step, buffers, False)
    _choose(shared, members, head, step.x, certain.last_rows, room, choices, 0)
    choices.clock[:] = nanoseconds()
    every = np.arange(guessed.x.shape[0])
    for place in range(guessed.slots.shape[0]):
        active, last = guessed.requests[place], guessed.pieces[place]
        if not _goes_on(choices, place + 1, active):
            return
        x, old = guessed.x[:active], guessed.work.pieces
        multiply(shared, room.pair_rows, active, head.mix, no_bias, False, x)
        meet(shared, members)
        pieces = Pieces(
            old.rows[:last], old.sequences[:last], guessed.lengths[place, :last], old.starts[:last], old.counts[:last]
        )
        work = Work(pieces, guessed.work.tiles, guessed.work.partial, guessed.work.several)
        cos, sin = guessed.cos[place : place + 1], guessed.sin[place : place + 1]
        slots = guessed.slots[place]
        rows = every[:active]
        later = Step(x, cos, sin, slots, step.keys, step.values, guessed.tables, work, step.tapped, rows, x)
        decode_layer(shared, members, head.net, 0, later, buffers, False)
        _choose(shared, members, head, x, rows, room, choices, place + 1)
        choices.passes[0] = place + 2
        choices.clock[1] = nanoseconds()


@compiled(FAST)
def _mix(shared: Any, members: int, head: HeadWeights, certain: Certain, room: Room) -> None:
    """What the layer reads of tokens that are certain."""
    step, count, no_bias = certain.step, certain.step.x.shape[0], np.empty(0, dtype=np.float32)
    joined = certain.features
    if head.joint.numbers.shape[0] > 0:
        joined = room.joined
        _unit_and_round(shared, certain.features, certain.embedded.shape[1], head.net.eps, room.feature_rows)
        meet(shared, members)
        multiply(shared, room.feature_rows, count, head.joint, no_bias, False, joined)
        meet(shared, members)
    _pair_up(shared, certain.embedded, joined, head.net.eps, room)
    meet(shared, members)
    multiply(shared, room.pair_rows, count, head.mix, no_bias, False, step.x)
    meet(shared, members)


@compiled(FAST)
def _goes_on(choices: Choices, place: int, active: int) -> bool:
    """Whether any of the first `active` requests still wants a guess at `place`: all of the team say the same."""
    likely = choices.likely[:active] >= choices.least[1, :active]
    return bool(np.any(likely & (choices.kept[:active] == place)))


@compiled(FAST)
def _unit_and_round(shared: Any, x: Any, size: int, eps: Any, rows: Rows) -> None:
    """Every `size` numbers of a row by themselves."""
    scaled = np.empty(x.shape[1], dtype=np.float32)
    while True:
        row = claim(shared, 1)
        if row >= x.shape[0]:
            return
        for first in range(0, x.shape[1], size):
            _unit(x[row, first : first + size], eps, scaled[first : first + size])
        round_row(scaled, rows, row)


@compiled(FAST)
def _pair_up(shared: Any, embedded: Any, states: Any, eps: Any, room: Room) -> None:
    """Each token beside the state of the one before it, as the mixture reads them."""
    hidden = embedded.shape[1]
    while True:
        row = claim(shared, 1)
        if row >= embedded.shape[0]:
            return
        _unit(embedded[row], eps, room.pairs[row, :hidden])
        _unit(states[row], eps, room.pairs[row, hidden:])
        round_row(room.pairs[row], room.pair_rows, row)


@compiled(FAST)
def _choose(
    shared: Any, members: int, head: HeadWeights, x: Any, chosen_rows: Any, room: Room, choices: Choices, place: int
) -> None:
    """The likeliest token behind each of these rows of x; and it beside the row's state, for the next guess."""
    count, hidden, net = chosen_rows.shape[0], x.shape[1], head.net
    while True:
        row = claim(shared, 1)
        if row >= count:
            break
        norm_row(x[chosen_rows[row]], net.final_norm, net.eps, room.states[row])
        round_row(room.states[row], room.state_rows, row)
    meet(shared, members)
    multiply(shared, room.state_rows, count, head.head, np.empty(0, dtype=np.float32), False, room.scores)
    meet(shared, members)
    while True:
        row = claim(shared, 1)
        if row >= count:
            break
        scores, best = room.scores[row], 0
        for token in range(scores.shape[0]):
            if scores[token] > scores[best]:
                best = token
        choices.tokens[row, place] = best
        _judge(scores, scores[best], choices, row, place)
        for i in range(hidden):
            room.pairs[row, i] = widen(head.embedded[best, i])
        _unit(room.states[row], net.eps, room.pairs[row, hidden:])
        round_row(room.pairs[row], room.pair_rows, row)
    meet(shared, members)


@compiled(FAST)
def _judge(scores: Any, highest: Any, choices: Choices, row: int, place: int) -> None:
    """How likely is the guess with the highest score? It is kept if those before it are, and it is likely enough."""
    total = np.float32(0.0)
    for token in range(scores.shape[0]):
        total += exp(scores[token] - highest)
    levels = choices.chances.shape[1]
    level = max(0, min(levels - 1, int(np.float32(levels) / total)))  # also if the scores are no numbers
    choices.levels[row, place] = level
    choices.likely[row] *= choices.chances[row, level]
    if choices.kept[row] == place and choices.likely[row] >= choices.least[0, row]:
        choices.kept[row] = place + 1


@compiled(FAST)
def _unit(values: Any, eps: Any, out: Any) -> None:
    """Scaled to a mean square of one."""
    squares = np.float32(0.0)
    for i in range(values.shape[0]):
        squares += values[i] * values[i]
    factor = np.float32(1.0) / np.sqrt(squares / np.float32(values.shape[0]) + eps)
    for i in range(values.shape[0]):
        out[i] = values[i] * factor
