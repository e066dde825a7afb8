"""The routing kernel against a loop over tokens, for every rule that a family has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.layers.linear import Build
from chairlift.layers.routing import ExpertRouter, Routing

RULES: dict[str, Routing] = {
    "mixtral": Routing(num_experts=8, top_k=2, normalize=True),
    "qwen2 moe": Routing(num_experts=60, top_k=4),
    "deepseek v2": Routing(num_experts=20, top_k=3, scale=16.0, num_groups=4, top_groups=2),
    "deepseek v3": Routing(
        num_experts=24,
        top_k=5,
        scores="sigmoid",
        normalize=True,
        scale=2.5,
        correction_bias=True,
        num_groups=6,
        top_groups=3,
        group_best=2,
    ),
    "groups of three": Routing(
        num_experts=12, top_k=4, scores="sigmoid", normalize=True, correction_bias=True, num_groups=4, top_groups=3
    ),
    "ernie": Routing(num_experts=9, top_k=3, normalize=True, correction_bias=True),
    "one of one": Routing(num_experts=1, top_k=1, scores="sigmoid"),
}


def by_hand(logits: Tensor, bias: Tensor | None, rule: Routing) -> dict[int, float]:
    """The experts of one token and their weights, in float64."""
    numbers = logits.double()
    scores = (numbers.softmax(0) if rule.scores == "softmax" else numbers.sigmoid()).tolist()
    choice = [score + (0.0 if bias is None else float(bias[i])) for i, score in enumerate(scores)]
    size = rule.num_experts // rule.num_groups
    groups = [range(start, start + size) for start in range(0, rule.num_experts, size)]
    groups.sort(key=lambda members: -sum(sorted((choice[i] for i in members), reverse=True)[: rule.group_best]))
    allowed = [i for members in groups[: rule.top_groups] for i in members]
    chosen = sorted(allowed, key=lambda i: -choice[i])[: rule.top_k]
    total = sum(scores[i] for i in chosen) if rule.normalize else 1.0
    return {i: scores[i] / total * rule.scale for i in chosen}


@pytest.mark.parametrize("name", RULES)
def test_routing(name: str, device: torch.device) -> None:
    rule = RULES[name]
    generator = torch.Generator().manual_seed(len(name))
    router = ExpertRouter(4, rule, Build(torch.float32, device))
    if router.correction_bias is not None:
        router.correction_bias.copy_(torch.randn(rule.num_experts, generator=generator) * 0.3)
    logits = (torch.randn(37, rule.num_experts, generator=generator) * 2).to(device)
    in_kernel = router.choose_on_gpu(logits, torch.float32)
    for weights, experts in (router.choose(logits), in_kernel):
        for row in range(len(logits)):
            wanted = by_hand(logits[row].cpu(), router.correction_bias, rule)
            found = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
            assert found == pytest.approx(wanted, rel=1e-5), f"token {row}"


def test_scores_that_are_not_numbers_choose_experts_that_exist(device: torch.device) -> None:
    for rule in RULES.values():
        router = ExpertRouter(4, rule, Build(torch.float32, device))
        if router.correction_bias is not None:
            router.correction_bias.zero_()
        _, experts = router.choose_on_gpu(torch.full((3, rule.num_experts), torch.nan, device=device), torch.float32)
        assert experts.clamp(0, rule.num_experts - 1).equal(experts)
