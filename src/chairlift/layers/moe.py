"""The mixture-of-experts feed-forward block: every token is sent to its top-k experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.layers.linear import Linear
from chairlift.layers.mlp import ACTIVATIONS, gated


class MixtureOfExperts:
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        normalize: bool,  # whether the weights of the chosen experts are scaled to sum to one
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.router = Linear.empty(hidden_size, num_experts, bias=False, dtype=dtype, device=device)
        self.gate_up = torch.empty(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(num_experts, hidden_size, intermediate_size, dtype=dtype, device=device)
        self._num_experts = num_experts
        self._top_k = top_k
        self._normalize = normalize
        self._activation = ACTIVATIONS[activation]

    @property
    def num_bytes(self) -> int:
        return self.router.num_bytes + self.gate_up.nbytes + self.down.nbytes

    def finalize(self) -> None:
        self.router.finalize()

    def __call__(self, x: Tensor) -> Tensor:
        weights, experts = self._route(x)
        # Sort the T * k (token, expert) pairs by expert: each expert then reads one contiguous run of rows.
        order = experts.flatten().argsort(stable=True)
        rows = x[order // self._top_k]
        outputs = torch.empty_like(rows)
        counts = torch.bincount(experts.flatten(), minlength=self._num_experts).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                run = slice(start, start + count)
                inner = gated(F.linear(rows[run], self.gate_up[expert]), self._activation)
                outputs[run] = F.linear(inner, self.down[expert])
                start += count
        # Back to token order before adding up: the sum of a token's k outputs has a fixed order then, whatever
        # else is in the batch.
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        by_token = by_token.view(x.shape[0], self._top_k, x.shape[1])
        return (by_token * weights.unsqueeze(-1)).sum(dim=1)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the indices of each token's experts, both [T, k]."""
        scores = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, experts = scores.topk(self._top_k, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts
