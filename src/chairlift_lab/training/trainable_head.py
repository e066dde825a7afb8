"""A draft head as a torch module: computes the same as `HeadNetwork` of speculation/draft_models.py, on whole texts.

In use, the second draft token is computed from the head's state at the first: the head attends to keys from the
target's states, and then to keys from its own. It is trained in the same way, at all positions of a text at once.
Depth 0 is computed from the target's states, depth 1 from the head's states of depth 0, and so on:

    position        t-3   t-2   t-1    t
    depth 0          x     x     .     .      visible from t at depth 2: depth 0 up to position t-2,
    depth 1          .     .     x     .      the position before in depth 1,
    depth 2          .     .     .     x      and itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.models.decoder import Decoder
from chairlift.speculation.head_layers import EPS, TRAINED_LENGTH, HeadConfig, head_rows, unit
from chairlift_lab.training.texts import TrainingTexts, refuse_unusual_attention

INITIAL_NORM_SCALE = 0.3
KeysValues = list[tuple[Tensor, Tensor]]  # keys and values of each depth [texts, heads, length, head_dim]


class TrainableHead(nn.Module):
    def __init__(self, config: HeadConfig, target: Decoder) -> None:
        super().__init__()
        layer, hidden = config.layer, config.hidden_size
        assert layer.rope is not None
        self.attention = layer.only_attention
        queries = self.attention.num_heads * self.attention.head_dim
        keys = self.attention.num_kv_heads * self.attention.head_dim
        self.joint = nn.Linear(config.feature_size, hidden, bias=False) if config.taps else nn.Identity()
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.input_layernorm = _Norm(hidden, EPS)
        self.post_attention_layernorm = _Norm(hidden, EPS)
        self.norm = _Norm(hidden, EPS)
        with torch.no_grad():
            # States end up as large as the target's; smaller ones at first avoid confident wrong drafts.
            self.norm.weight.copy_(INITIAL_NORM_SCALE * target.norm.weight)
        self.inv_freq = torch.tensor(layer.rope.inv_freq, device=target.device)

    def forward(self, embedded: Tensor, previous: Tensor, earlier: KeysValues) -> Tensor:
        """Embeddings of the tokens and states of the tokens before -> states, all [texts, length, hidden].
        `earlier`: keys and values of the depths before; those of this depth are appended."""
        x = self.mix(torch.cat((unit(embedded), unit(previous).to(embedded.dtype)), dim=-1)).float()
        x = x + self.o_proj(self._attend(self.input_layernorm(x), earlier))
        y = self.post_attention_layernorm(x)
        x = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        states: Tensor = self.norm(x)
        return states

    def _attend(self, x: Tensor, earlier: KeysValues) -> Tensor:
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.inv_freq
        q, k = (_rotate(heads, angles.cos(), angles.sin()) for heads in (q, k))
        shared_by = self.attention.num_heads // self.attention.num_kv_heads
        earlier.append((k.repeat_interleave(shared_by, dim=1), v.repeat_interleave(shared_by, dim=1)))
        keys, values = (torch.cat(side, dim=2) for side in zip(*earlier, strict=True))
        mask = None if len(earlier) == 1 else visible_positions(x.shape[1], len(earlier) - 1, x.device)
        attended = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.attention.scale
        )
        return attended.transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.attention.head_dim)).transpose(1, 2)
        return heads

    def tensors(self) -> dict[str, Tensor]:
        """The weights under their names in a checkpoint."""
        where = {"joint": "joint", "mix": "mix", "norm": "norm"} | {
            name: f"layers.0.{part}{name}"
            for part, names in {
                "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj"),
                "mlp.": ("gate_proj", "up_proj", "down_proj"),
                "": ("input_layernorm", "post_attention_layernorm"),
            }.items()
            for name in names
        }
        return {f"{where[name.split('.')[0]]}.weight": value for name, value in self.state_dict().items()}


class _Norm(nn.RMSNorm):
    """RMSNorm in float32, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class WholeTextAttention(StepAttention):
    """Causal attention over whole texts of equal length, without a cache."""

    def __init__(self, length: int) -> None:
        self._length = length

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        refuse_unusual_attention((layer,))
        q, k, v = (heads.unflatten(0, (-1, self._length)).transpose(1, 2) for heads in (q, k, v))
        grouped = layer.num_heads != layer.num_kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)


def visible_positions(length: int, depth: int, device: torch.device) -> Tensor:
    """[length, (depth + 1) * length] bool: the keys of all depths that each position of `depth` attends to."""
    position = torch.arange(length, device=device)
    before = position[:, None] - position
    return torch.cat([before >= depth, *(before == depth - other for other in range(1, depth + 1))], dim=1)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


DEPTH = TRAINED_LENGTH  # draft tokens in a row, each from the head's own state at the one before
DEPTH_WEIGHT = 0.8  # weight of a draft token, relative to the one before it
AFTER_A_MISS = 0.2  # weight of a draft token after a wrong one, which would not be used
AFTER_A_HIT = 0.5  # weight of a first draft token where a step seldom begins, because the token there was drafted
LIKELIEST_SHARE = 0.5  # the target's likeliest token is this share of the training target; the rest is its distribution
USUAL_DRAFT_LENGTH = 3  # this many draft tokens pay at most positions


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
        weights = written.float()  # the weight of each position
        loss, hits, earlier = torch.zeros((), device=device), [], KeysValues()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            previous = head.joint(features)
            for depth in range(DEPTH):
                # Each token is read with the state before it; the first with zeros.
                previous = head(embedded, F.pad(previous[:, :-1], (0, 0, 1, 0)), earlier)
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
            hidden, taps = self._target.hidden_states(StepBatch(flat, positions), WholeTextAttention(length))
            # Scaled to one size, because the residual stream grows from layer to layer.
            features = hidden if not taps else torch.cat([unit(state) for state in (*taps, hidden)], dim=-1)
            states = hidden, features, self._target.embed(flat)
        hidden, features, embedded = (copied(state).view(texts, length, -1) for state in states)
        return hidden, features, embedded

    def _target_choice(self, hidden: Tensor) -> Tensor:
        """The target's likeliest next token, from its whole vocabulary."""
        with torch.inference_mode():
            choices = [self._target.logits(part).argmax(dim=-1) for part in hidden.split(4096)]
        return copied(torch.cat(choices))


def copied(tensor: Tensor) -> Tensor:
    """A copy that gradients may flow through: outputs of inference mode allow none."""
    with torch.inference_mode(False):
        return tensor.clone()


@dataclass(frozen=True, slots=True)
class DraftAccuracy:
    everywhere: float  # share of first draft tokens that are right, over all positions of the answers
    by_place: tuple[float, ...]  # the same for each place of the drafts that would be made, after right ones only
    tokens_per_step: float

    def __str__(self) -> str:
        places = ", ".join(f"{share:.1%}" for share in self.by_place)
        drafted = f"right where drafted {places}: {self.tokens_per_step:.3f} tokens per step"
        return f"{drafted}; right at all positions {self.everywhere:.1%}"


def evaluate(answers: Sequence[tuple[Tensor, Tensor]], draft_length: int = USUAL_DRAFT_LENGTH) -> DraftAccuracy:
    """The accuracy on greedy texts, as they would have been generated with drafts.

    answers: parts of the texts, each as hits [depths, texts, length] (whether the draft token of that depth at that
    position is the target's next token) and written [texts, length].

    A step begins where the one before it ended, which is behind a token that the draft missed. Missed tokens come in
    clusters, so the drafts that are made are right less often than drafts at all positions would be.
    """
    everywhere = torch.zeros(2)
    drafted, right = torch.zeros(draft_length), torch.zeros(draft_length)
    steps = tokens = 0
    for hits, written in answers:
        hits, written = hits.cpu() & written.cpu(), written.cpu()
        everywhere += torch.tensor([hits[0].sum(), written.sum()])
        accepted = _accepted_lengths(hits, draft_length)
        begins = torch.zeros(len(written), dtype=torch.long)  # the position where the next step of each text begins
        for position in range(written.shape[1]):
            now = written[:, position] & (begins <= position)
            lengths = accepted[now, position]
            steps += len(lengths)
            tokens += int((lengths + 1).sum())
            for depth in range(draft_length):
                drafted[depth] += (lengths >= depth).sum()
                right[depth] += (lengths > depth).sum()
            begins[now] = position + 1 + lengths
    shares = (right / drafted.clamp(min=1)).tolist()
    return DraftAccuracy(float(everywhere[0] / everywhere[1].clamp(min=1)), tuple(shares), tokens / max(1, steps))


def _accepted_lengths(hits: Tensor, draft_length: int) -> Tensor:
    """[texts, length]: how many draft tokens of a step that begins there are right, up to the first wrong one."""
    length = hits.shape[2]
    accepted, all_right = torch.zeros(hits.shape[1:], dtype=torch.long), torch.ones(hits.shape[1:], dtype=torch.bool)
    for depth in range(min(draft_length, length)):
        right = torch.zeros_like(all_right)
        right[:, : length - depth] = hits[depth, :, depth:]
        all_right = all_right & right
        accepted += all_right
    return accepted
