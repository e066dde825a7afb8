"""Routing: which experts of a mixture compute a token, and with which weights.

scores   softmax or sigmoid of the router's product with the token
choice   scores + correction bias; with groups only the experts of the best groups; the best top_k
weights  the chosen experts' scores (without the bias), scaled to sum to one, times a factor
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.linear import Build, Linear
from chairlift.layers.parts import Part, Targets
from chairlift.layers.rows import one_by_one

if TYPE_CHECKING:  # triton is not needed on a CPU
    from chairlift.kernels.triton.experts.few_rows import RowNorm
    from chairlift.kernels.triton.experts.routing import Grouping, RouteRule

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rule by which experts are chosen and weighted.

    A softmax over the chosen experts only, as some families compute it, is `softmax` with `normalize`.
    """

    num_experts: int
    top_k: int
    scores: Scores = "softmax"
    normalize: bool = False  # scale the weights of the chosen experts to sum to one
    normalize_eps: float = 1e-20  # added to the sum that divides
    scale: float = 1.0  # multiplies the weights
    correction_bias: bool = False  # numbers per expert added to the scores for the choice, not for the weights
    num_groups: int = 1  # The experts form groups of equal size.
    top_groups: int = 1  # A token uses this many groups.
    group_best: int = 1  # A token's groups have the largest sums of this many of their best scores.
    router_bias: bool = False  # the product has a bias
    float32: bool = False  # the product is computed in float32
    weights_inputs: bool = False  # the weights multiply the experts' inputs instead of their outputs

    def __post_init__(self) -> None:
        size, rest = divmod(self.num_experts, self.num_groups)
        assert rest == 0
        assert 1 <= self.top_groups <= self.num_groups
        assert 1 <= self.group_best <= size
        assert 1 <= self.top_k <= self.top_groups * size


class ExpertRouter(Part):
    """Scores every expert for every token and chooses the best."""

    def __init__(self, hidden_size: int, routing: Routing, build: Build) -> None:
        self.routing = routing
        self._dtype = torch.float32 if routing.float32 else build.dtype
        own = Build(self._dtype, build.device)
        self.linear = own.linear(hidden_size, routing.num_experts, bias=routing.router_bias)
        self.correction_bias: Tensor | None = None
        if routing.correction_bias:
            self.correction_bias = build.empty(routing.num_experts, dtype=torch.float32)

    def targets(self, name: str, correction_bias_name: str, correction_bias_is_row: bool = False) -> Targets:
        yield from self.linear.targets([name])
        if self.correction_bias is not None:
            yield correction_bias_name, self.correction_bias[None] if correction_bias_is_row else self.correction_bias

    def parts(self) -> tuple[Linear]:
        return (self.linear,)

    @property
    def num_bytes(self) -> int:
        return self.linear.num_bytes + (0 if self.correction_bias is None else self.correction_bias.nbytes)

    def __call__(self, x: Tensor, num_shared: int = 0) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> the weights and the indices of each token's experts, both [T, top_k + num_shared].

        `num_shared`, on a GPU only: further experts, which every token uses with weight 1.
        """
        logits = self.linear(x.to(self._dtype))
        if on_gpu(x.device):
            return self.choose_on_gpu(logits, x.dtype, num_shared)
        assert num_shared == 0
        weights, experts = self.choose(logits)
        return weights.to(x.dtype), experts

    def choose_on_gpu(self, logits: Tensor, dtype: torch.dtype, num_shared: int = 0) -> tuple[Tensor, Tensor]:
        """As `choose`, in one kernel."""
        from chairlift.kernels.triton.experts.routing import route

        return route(logits, self.correction_bias, dtype, self._rule(num_shared))

    def group_few(
        self, x: Tensor, positions: Tensor, norm: RowNorm | None = None, num_shared: int = 0
    ) -> tuple[Tensor, Grouping, Tensor]:
        """The weights [T, top_k + num_shared] of few tokens' experts, the tiles of all experts, and x, normed if there
        is a norm, in one kernel; rows at positions below 0 are in no tile."""
        from chairlift.kernels.triton.experts.few_rows import route_and_group

        weight = self.linear.weight.plain
        assert weight is not None
        rule = self._rule(num_shared)
        return route_and_group(x, weight, self.linear.bias, self.correction_bias, rule, positions, norm)

    def _rule(self, num_shared: int) -> RouteRule:
        from chairlift.kernels.triton.experts.routing import RouteRule

        routing = self.routing
        return RouteRule(
            top_k=routing.top_k,
            sigmoid=routing.scores == "sigmoid",
            normalize=routing.normalize,
            normalize_eps=routing.normalize_eps,
            scale=routing.scale,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            group_best=routing.group_best,
            num_shared=num_shared,
        )

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [T, experts] -> weights (float32) and experts, both [T, top_k]."""
        routing = self.routing
        if routing.scores == "softmax":
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        else:
            logits = logits.float()
            scores = one_by_one(torch.sigmoid, logits) if self.batch_invariant else logits.sigmoid()
        choice = scores if self.correction_bias is None else scores + self.correction_bias
        if routing.top_groups < routing.num_groups:
            choice = self._within_best_groups(choice)
        experts = choice.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if routing.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.normalize_eps)
        return weights * routing.scale, experts

    def _within_best_groups(self, choice: Tensor) -> Tensor:
        routing = self.routing
        groups = choice.view(len(choice), routing.num_groups, -1)  # [T, groups, size]
        sums = groups.topk(routing.group_best, dim=-1).values.sum(dim=-1)
        best = torch.zeros_like(sums, dtype=torch.bool)
        best.scatter_(1, sums.topk(routing.top_groups, dim=-1).indices, True)
        return groups.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(1)
