"""What a draft head has to get right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.lab.training.texts import Texts
from chairlift.lab.training.trainable_head import Seen, TrainableHead, WholeTexts
from chairlift.models.decoder import Decoder
from chairlift.speculation.head_config import TRAINED_LENGTH
from chairlift.speculation.head_layers import head_rows, unit

DEPTH = TRAINED_LENGTH  # each from the head's own state at the one before
DEPTH_WEIGHT = 0.8  # of each guess, compared with the one before it
AFTER_A_MISS = 0.2  # the weight of a guess that would not be asked for, because the one before it was wrong
AFTER_A_HIT = 0.5  # and of a first guess where a step seldom begins, because the place before foresaw the token there
CERTAIN = 0.5  # the share of what the target says is likeliest; the rest is how likely it finds every token


@dataclass(frozen=True, slots=True)
class Outcome:
    loss: Tensor
    hits: Tensor  # [DEPTH, texts, length] bool: whether what was guessed there is what the target says next


class Lesson:
    """The target and the tokens that may be guessed, for which it says what is right."""

    def __init__(self, target: Decoder, token_ids: Tensor) -> None:
        self._target = target
        self._token_ids = token_ids
        self._rows = copied(head_rows(target, token_ids))  # [draft vocab, hidden]

    def study(self, head: TrainableHead, texts: Texts) -> Outcome:
        device = self._target.device
        tokens, written = texts.tokens.long().to(device), texts.written.to(device)
        counted = written.nonzero(as_tuple=True)
        with torch.no_grad():
            hidden, features, embedded = self._target_states(tokens)
            goal = self._goal(hidden[counted])
            best = torch.full_like(tokens, -1)
            best[counted] = self._target_choice(hidden[counted])
        weights = written.float()  # of each place
        loss, hits, seen = torch.zeros((), device=device), [], Seen()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            previous = head.joint(features)
            for depth in range(DEPTH):
                previous = head(embedded, _later(previous), seen)
                scores = F.linear(previous[counted], self._rows.to(previous.dtype))
                missed = F.cross_entropy(scores.float(), goal, reduction="none")
                guesses = torch.full_like(tokens, -2)
                guesses[counted] = self._token_ids[scores.argmax(dim=-1)]
                hits.append(guesses == best)
                came = guesses[:, :-1] == tokens[:, 1:]
                if depth == 0:
                    weights = weights * F.pad(torch.where(came, AFTER_A_HIT, 1.0), (1, 0), value=1.0)
                share = weights[counted]
                loss = loss + DEPTH_WEIGHT**depth * (missed * share).sum() / share.sum().clamp(min=1.0)
                # One place on, the next depth guesses, if what came was what this one said.
                weights = F.pad(weights[:, :-1] * torch.where(came, 1.0, AFTER_A_MISS), (1, 0)) * written
        return Outcome(loss, torch.stack(hits))

    def _goal(self, hidden: Tensor) -> Tensor:
        """What the head should say, of the tokens that it can guess [places, draft vocab]. A guess is made for the
        likeliest token; but which others were nearly as likely teaches more than that one alone."""
        goal = F.linear(hidden, self._rows).float().softmax(dim=-1)
        best = goal.argmax(dim=-1, keepdim=True)
        return goal.mul_(1 - CERTAIN).scatter_add_(1, best, torch.full_like(goal[:, :1], CERTAIN))

    def _target_states(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, what the head reads of them, and embeddings: each [texts, length, ...]."""
        texts, length = tokens.shape
        flat, positions = tokens.flatten(), torch.arange(length, device=tokens.device).repeat(texts)
        with torch.inference_mode():
            hidden, taps = self._target.hidden_states(flat, positions, WholeTexts(length))
            # Each of the same size, however large the stream has grown.
            features = hidden if taps is None else torch.cat([unit(state) for state in (*taps, hidden)], dim=-1)
            found = hidden, features, self._target.embed(flat)
        hidden, features, embedded = (copied(states).view(texts, length, -1) for states in found)
        return hidden, features, embedded

    def _target_choice(self, hidden: Tensor) -> Tensor:
        """What the target would say next, of all its tokens."""
        with torch.inference_mode():
            found = [self._target.logits(part).argmax(dim=-1) for part in hidden.split(4096)]
        return copied(torch.cat(found))


def _later(states: Tensor) -> Tensor:
    """Each at the place of the next token; before the first there was none."""
    return F.pad(states[:, :-1], (0, 0, 1, 0))


def copied(tensor: Tensor) -> Tensor:
    """The model was loaded for inference only; copies of what comes out of it may be trained on."""
    with torch.inference_mode(False):
        return tensor.clone()
