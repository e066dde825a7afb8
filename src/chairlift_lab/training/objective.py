"""The loss that a draft head is trained with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.models.decoder import Decoder
from chairlift.speculation.head_config import TRAINED_LENGTH
from chairlift.speculation.head_layers import head_rows, unit
from chairlift_lab.training.texts import TrainingTexts
from chairlift_lab.training.trainable_head import KeysValues, TrainableHead, WholeTextAttention

DEPTH = TRAINED_LENGTH  # draft tokens in a row, each from the head's own state at the one before
DEPTH_WEIGHT = 0.8  # of a draft token, relative to the one before it
AFTER_A_MISS = 0.2  # weight of a draft token after a wrong one, which would not be used
AFTER_A_HIT = 0.5  # weight of a first draft token where a step seldom begins, because the token there was drafted
LIKELIEST_SHARE = 0.5  # of the training target that is the target's likeliest token; the rest is its distribution


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    loss: Tensor
    hits: Tensor  # [DEPTH, texts, length] bool: whether the draft token is the target's next token


class DraftObjective:
    """Compares a head's drafts with the target's distribution over the draft vocabulary."""

    def __init__(self, target: Decoder, token_ids: Tensor) -> None:
        self._target = target
        self._token_ids = token_ids
        self._rows = copied(head_rows(target, token_ids))  # [draft vocab, hidden]

    def evaluate(self, head: TrainableHead, texts: TrainingTexts) -> ObjectiveResult:
        device = self._target.device
        tokens, written = texts.tokens.long().to(device), texts.written.to(device)
        counted = written.nonzero(as_tuple=True)
        with torch.no_grad():
            hidden, features, embedded = self._target_states(tokens)
            goal = self._goal(hidden[counted])
            best = torch.full_like(tokens, -1)
            best[counted] = self._target_choice(hidden[counted])
        weights = written.float()  # of each position
        loss, hits, seen = torch.zeros((), device=device), [], KeysValues()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            previous = head.joint(features)
            for depth in range(DEPTH):
                previous = head(embedded, _shifted(previous), seen)
                scores = F.linear(previous[counted], self._rows.to(previous.dtype))
                losses = F.cross_entropy(scores.float(), goal, reduction="none")
                drafted = torch.full_like(tokens, -2)
                drafted[counted] = self._token_ids[scores.argmax(dim=-1)]
                hits.append(drafted == best)
                right = drafted[:, :-1] == tokens[:, 1:]
                if depth == 0:
                    weights = weights * F.pad(torch.where(right, AFTER_A_HIT, 1.0), (1, 0), value=1.0)
                share = weights[counted]
                loss = loss + DEPTH_WEIGHT**depth * (losses * share).sum() / share.sum().clamp(min=1.0)
                # The next depth drafts one position later, and is used only if this one was right.
                weights = F.pad(weights[:, :-1] * torch.where(right, 1.0, AFTER_A_MISS), (1, 0)) * written
        return ObjectiveResult(loss, torch.stack(hits))

    def _goal(self, hidden: Tensor) -> Tensor:
        """The distribution to learn [positions, draft vocab]. Only the likeliest token is drafted, but the
        probabilities of the others teach more than that token alone."""
        goal = F.linear(hidden, self._rows).float().softmax(dim=-1)
        best = goal.argmax(dim=-1, keepdim=True)
        return goal.mul_(1 - LIKELIEST_SHARE).scatter_add_(1, best, torch.full_like(goal[:, :1], LIKELIEST_SHARE))

    def _target_states(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, the features that the head reads, and embeddings: each [texts, length, ...]."""
        texts, length = tokens.shape
        flat, positions = tokens.flatten(), torch.arange(length, device=tokens.device).repeat(texts)
        with torch.inference_mode():
            hidden, taps = self._target.hidden_states(flat, positions, WholeTextAttention(length))
            # Scaled to one size, because the residual stream grows from layer to layer.
            features = hidden if not taps else torch.cat([unit(state) for state in (*taps, hidden)], dim=-1)
            found = hidden, features, self._target.embed(flat)
        hidden, features, embedded = (copied(states).view(texts, length, -1) for states in found)
        return hidden, features, embedded

    def _target_choice(self, hidden: Tensor) -> Tensor:
        """The target's likeliest next token, from its whole vocabulary."""
        with torch.inference_mode():
            found = [self._target.logits(part).argmax(dim=-1) for part in hidden.split(4096)]
        return copied(torch.cat(found))


def _shifted(states: Tensor) -> Tensor:
    """Each state at the position of the next token; zeros at the first."""
    return F.pad(states[:, :-1], (0, 0, 1, 0))


def copied(tensor: Tensor) -> Tensor:
    """A copy that gradients may flow through: outputs of inference mode allow none."""
    with torch.inference_mode(False):
        return tensor.clone()
