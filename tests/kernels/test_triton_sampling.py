"""Tokens sampled on the device equal those of the host's sampler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.core.sampling.params import SamplingParams
from chairlift.kernels.triton.sampling import sample
from chairlift.sampling.draw import draw, filter_probabilities, filters_of


def run(logits: Tensor, params: list[SamplingParams], uniforms: list[float], slots: list[int]) -> tuple[Tensor, Tensor]:
    device = logits.device
    tokens = torch.full((len(params),), -9, dtype=torch.int32, device=device)
    last = torch.full((12,), -9, dtype=torch.int32, device=device)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    sample(
        logits,
        tokens=tokens,
        last_token=last,
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        temperature=floats([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        top_p=floats([p.top_p for p in params]),
        min_p=floats([p.min_p for p in params]),
        uniforms=floats(uniforms),
    )
    return tokens.cpu(), last.cpu()


def expected(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    logits = logits.cpu().clone()
    temperatures = torch.tensor([p.temperature for p in params])
    weights = logits.div_(temperatures[:, None]).softmax(dim=-1)
    filter_probabilities(weights, [filters_of(one) for one in params])
    return draw(weights, uniforms)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_draws_equal_the_hosts(options: dict[str, float], device: torch.device) -> None:
    torch.manual_seed(1)
    logits = torch.randn(12, 300, device=device) * 3
    params = [SamplingParams(**options)] * len(logits)  # type: ignore[arg-type]
    uniforms = torch.rand(len(logits)).tolist()
    tokens, last = run(logits, params, uniforms, list(reversed(range(12))))
    assert tokens.tolist() == expected(logits, params, uniforms).tolist()
    assert last.tolist() == tokens.tolist()[::-1]


def test_greedy_rows_padding_rows_and_bad_rows(device: torch.device) -> None:
    logits = torch.randn(5, 9000, device=device)
    logits[0, 77] = logits[0, 8800] = 50.0  # a tie: the lowest id wins
    logits[2, 5] = float("nan")
    logits[3, 5] = float("inf")
    logits[4] = float("-inf")
    params = [SamplingParams(temperature=0.0)] * 5
    tokens, last = run(logits, params, [0.5] * 5, [3, -1, 1, 2, 4])
    assert tokens.tolist() == [77, -9, -1, -1, -1]
    assert last.tolist() == [-9, -1, -1, 77, -1] + [-9] * 7


def test_a_uniform_close_to_one_never_draws_a_token_without_weight(device: torch.device) -> None:
    logits = torch.randn(4, 100, device=device)
    logits[:, 60:] = float("-inf")
    params = [SamplingParams(temperature=1.0)] * 4
    tokens, _ = run(logits, params, [1.0 - 2**-24] * 4, [0, 1, 2, 3])
    assert (tokens < 60).all()
