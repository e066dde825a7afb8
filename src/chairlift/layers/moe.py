"""The mixture-of-experts feed-forward block: every token is sent to its top-k experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.expert_weights import ExpertWeights, empty_experts
from chairlift.layers.formats.base import Fusion
from chairlift.layers.formats.fp8 import round_rows
from chairlift.layers.linear import Build, Linear
from chairlift.layers.mlp import ACTIVATIONS, ClampedGate, GatedMLP, UngatedMLP, apply_gate
from chairlift.layers.parts import Part, Targets, add_prefix, present
from chairlift.layers.routing import ExpertRouter, Routing
from chairlift.layers.rows import in_tiles, one_by_one

if TYPE_CHECKING:  # triton is not needed on a CPU
    from chairlift.kernels.triton.experts.few_rows import RowNorm
    from chairlift.kernels.triton.experts.products import Gate, SharedMatrix
    from chairlift.kernels.triton.experts.routing import Grouping


class SharedExpert(Part):
    """A feed-forward block that computes every token beside the chosen experts; some families gate its output."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        build: Build,
        *,
        is_gated: bool,
        has_gates: bool = True,
        activation: str,
    ) -> None:
        """`is_gated`: a gate multiplies the output; `has_gates`: the block itself has one."""
        self.mlp = (GatedMLP if has_gates else UngatedMLP)(hidden_size, intermediate_size, build, activation=activation)
        self.gate = build.plain.linear(hidden_size, 1) if is_gated else None
        self.activation = activation

    def resembles(self, intermediate_size: int, has_gates: bool, activation: str | ClampedGate) -> bool:
        """Whether the block is the sum of experts of this size and kind, whose kernels have the activation."""
        in_kernels = activation == "silu" or not has_gates
        same = self.activation == activation and (self.mlp.width == GatedMLP.width) == has_gates
        return self.gate is None and in_kernels and same and self.mlp.down.in_features % intermediate_size == 0

    def targets(self, name: str, inner_names: Sequence[str], down_name: str, gate_name: str) -> Targets:
        yield from add_prefix(name, self.mlp.targets(inner_names, down_name))
        if self.gate is not None:
            yield from self.gate.targets([gate_name])

    def parts(self) -> tuple[Part, ...]:
        return present(self.mlp, self.gate)

    def matrices(self, count: int) -> tuple[SharedMatrix, SharedMatrix] | None:
        """Both products as those of `count` experts, if the weights lie in memory as the kernels of experts read
        them."""
        from chairlift.kernels.triton.experts.products import SharedMatrix

        first, down = self.mlp.first.weight.row_major, self.mlp.down.weight.row_major
        return None if first is None or down is None else (SharedMatrix(*first, count), SharedMatrix(*down, count))

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        """Add the block's output for x to `total` in place and return it."""
        inner, down = self.mlp.inner(x), self.mlp.down
        if self.gate is None and down.fuses("add", len(inner)):
            down.weight.product(inner, Fusion(add_to=total))
            return total
        product = down(inner)
        if self.gate is None:
            return total.add_(product)
        if on_gpu(x.device):
            from chairlift.kernels.triton.layers import add_gated_

            assert self.gate.weight.plain is not None
            return add_gated_(total, product, x, self.gate.weight.plain)
        gate = self.gate(x)
        return total.add_(product * (one_by_one(torch.sigmoid, gate) if self.batch_invariant else gate.sigmoid()))


class MixtureOfExperts(Part):
    """A router and experts, each a feed-forward block."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        build: Build,
        *,
        shared: SharedExpert | None = None,
        bias: bool = False,
        has_gates: bool = True,
        latent_size: int = 0,
        activation: str | ClampedGate,
    ) -> None:
        """`has_gates`: the experts are gated blocks; `latent_size`: they read a projection of the rows to this size;
        the format of the build decides in which form the experts' weights are kept."""
        num_experts, size, inner = routing.num_experts, latent_size or hidden_size, intermediate_size
        self.router = ExpertRouter(hidden_size, routing, build.plain)
        self.gate_up = empty_experts(num_experts, (1 + has_gates) * inner, size, build)
        self.down = empty_experts(num_experts, size, inner, build)
        self.gate_up_bias = build.empty(*self.gate_up.shape[:2]) if bias else None
        self.down_bias = build.empty(*self.down.shape[:2]) if bias else None
        self.latent: tuple[Linear, Linear] | None = None
        if latent_size:
            self.latent = build.plain.linear(hidden_size, latent_size), build.plain.linear(latent_size, hidden_size)
        self.shared = shared
        self._has_gates = has_gates
        self._num_experts = num_experts
        self._top_k = routing.top_k
        self._weights_inputs = routing.weights_inputs
        assert not (bias and routing.weights_inputs)
        self._activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self._num_shared = 0  # experts of the inner size of the others that the shared one is made of
        if shared is not None and not bias and not latent_size and shared.resembles(inner, has_gates, activation):
            self._num_shared = shared.mlp.down.in_features // inner

    def expert_targets(self, inner_names: Sequence[str], down_name: str) -> Targets:
        """The routed experts' weights, by the expert's number."""
        size = self.gate_up.shape[1] // len(inner_names)
        for index in range(self._num_experts):
            for part, name in enumerate(inner_names):
                yield f"{index}.{name}.weight", self.gate_up.rows(index, part * size, size)
            yield f"{index}.{down_name}.weight", self.down.rows(index, 0, self.down.shape[1])
        if self.gate_up_bias is not None and self.down_bias is not None:
            for index, (both, down) in enumerate(zip(self.gate_up_bias, self.down_bias, strict=True)):
                for name, part in zip(inner_names, both.chunk(1 + self._has_gates), strict=True):
                    yield f"{index}.{name}.bias", part
                yield f"{index}.{down_name}.bias", down

    def parts(self) -> tuple[Part, ...]:
        return present(self.router, *(self.latent or ()), self.shared, self.gate_up, self.down)

    @property
    def num_bytes(self) -> int:
        biases = (self.gate_up_bias, self.down_bias)
        return super().num_bytes + sum(bias.nbytes for bias in biases if bias is not None)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden].

        Rows at positions [T] below 0 are padding of a captured step. On a GPU no expert is read for them, and their
        output is undefined.
        """
        rows = x if self.latent is None else self.latent[0](x)
        num_folded = 0
        if not on_gpu(x.device):
            routed = self._one_after_the_other(rows, *self.router(x))
        else:
            num_folded = self.num_folded(len(x))
            if self._has_few_rows(x):
                routed = self.few_rows(x, rows, positions)
            else:
                routed = self.grouped(rows, *self.router(x, num_folded), positions)
        if self.latent is not None:
            routed = self.latent[1](routed)
        return routed if self.shared is None or num_folded else self.shared.add_to_(routed, x)

    def num_folded(self, tokens: int) -> int:
        """The experts of the shared block, if the kernels of the routed ones compute them, too, for `tokens` tokens."""
        from chairlift.kernels.triton.experts.tiling import folds_shared

        can_fold = self._num_shared and not self.batch_invariant and folds_shared(tokens)
        return self._num_shared if can_fold and self._shared_matrices() is not None else 0

    def _shared_matrices(self) -> tuple[SharedMatrix, SharedMatrix] | None:
        """Both products of the shared experts, if they have the form of the others."""
        matrices = None if self.shared is None else self.shared.matrices(self._num_shared)
        if matrices is None:
            return None
        forms = tuple("plain" if each.scales is None else "fp8" for each in matrices)
        return matrices if forms == (self.gate_up.form, self.down.form) else None

    def _one_after_the_other(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        # Sort the T * k (token, expert) pairs by expert: each expert then reads one contiguous run of rows.
        order = experts.flatten().argsort(stable=True)
        rows = x[order // self._top_k]
        if self._weights_inputs:
            rows *= weights.flatten()[order].unsqueeze(-1)
        outputs = torch.empty_like(rows)
        counts = torch.bincount(experts.flatten(), minlength=self._num_experts).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                run = slice(start, start + count)
                outputs[run] = self._expert(expert, rows[run])
                start += count
        # Back to token order before adding up: then the sum of a token's k outputs has a fixed order, whatever else
        # is in the batch.
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        by_token = by_token.view(x.shape[0], self._top_k, x.shape[1])
        return (by_token if self._weights_inputs else by_token * weights.unsqueeze(-1)).sum(dim=1)

    def grouped(self, x: Tensor, weights: Tensor, experts: Tensor, positions: Tensor) -> Tensor:
        """All experts in two grouped products; the routing stays on the device. weights, experts [T, k]: of the
        routed experts, or also of the shared ones behind them."""
        from chairlift.kernels.triton.experts import products, routing
        from chairlift.kernels.triton.experts.tiling import (
            ExpertTiling,
            has_few_pairs,
            shared_tile_rows,
            tiling_for,
        )

        tokens, per_token = experts.shape
        pairs, num_shared = tokens * self._top_k, per_token - self._top_k
        tilings = tiling_for(
            pairs,
            self._num_experts,
            x.dtype,
            self.gate_up.form,
            x.device,
            invariant=self.batch_invariant,
        )
        shared_rows = shared_tile_rows(tokens, tilings.rows) if num_shared else tilings.rows
        groups = routing.group_by_expert(
            experts, self._num_experts, tilings.rows, positions, num_shared=num_shared, shared_rows=shared_rows
        )
        # Widening weights of 8 bits takes no longer than reading them as long as they are read once.
        few = has_few_pairs(pairs, self._num_experts)
        rounds = self.gate_up.form == "fp8" and (self.batch_invariant or not few)
        first, second = self._options(weights)

        def product(rows: Tensor, weights: ExpertWeights, tiling: ExpertTiling, **more: Any) -> Tensor:
            scales = None
            if rounds:
                rows, scales = round_rows(rows)
            more |= {"x_scales": scales, "out_dtype": x.dtype, "shared_rows": shared_rows}
            return products.grouped_linear(rows, weights.matrix, groups, tiling, per_token, **more)

        gate = self._kernel_gate()
        inner = product(x, self.gate_up, tilings.inner, gate=gate, **first)
        if gate is None:
            inner = self._activate(inner)
        outputs = product(inner, self.down, tilings.outer, **second)
        return products.add_up(outputs, per_token)

    def _has_few_rows(self, x: Tensor) -> bool:
        """Whether `few_rows` computes these rows; kernels that serve every step do not."""
        from chairlift.kernels.triton.experts.few_rows import can_route_few
        from chairlift.kernels.triton.launch import tuned

        return tuned() and not self.batch_invariant and can_route_few(len(x), self._top_k)

    def few_rows(self, x: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """As `grouped`, in three kernels: the routing of x, and two products of `rows`, which are x but for models that
        project it."""
        weights, groups, _ = self.router.group_few(x, positions, num_shared=self.num_folded(len(x)))
        return self._few_products(rows, weights, groups)[0]

    def adds_few_rows(self, x: Tensor) -> bool:
        """Whether `add_few_rows` computes these rows."""
        is_whole = self.latent is None and (self.shared is None or self.num_folded(len(x)) > 0)
        return is_whole and self._has_few_rows(x)

    def add_few_rows(self, x: Tensor, norm: RowNorm, positions: Tensor) -> Tensor:
        """Add the block of the normed rows to x in place, in three kernels; returns the partial sums of squares of the
        new rows."""
        weights, groups, rows = self.router.group_few(x, positions, norm, self.num_folded(len(x)))
        squares = self._few_products(rows, weights, groups, add_to=x)[1]
        assert squares is not None
        return squares

    def _few_products(
        self, rows: Tensor, weights: Tensor, groups: Grouping, add_to: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        from chairlift.kernels.triton.experts.products import grouped_linear, grouped_product
        from chairlift.kernels.triton.experts.tiling import few_rows_tiling

        tilings = few_rows_tiling(len(rows), rows.dtype, self.gate_up.form)
        gate, per_token = self._kernel_gate(), weights.shape[1]
        first, second = self._options(weights)
        first["shared_rows"] = second["shared_rows"] = tilings.rows
        inner = grouped_linear(rows, self.gate_up.matrix, groups, tilings.inner, per_token, gate=gate, **first)
        if gate is None:
            inner = self._activate(inner)
        second |= {"sum_tokens": True, "add_to": add_to}
        return grouped_product(inner, self.down.matrix, groups, tilings.outer, per_token, **second)

    def _options(self, weights: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keyword arguments of the two grouped products, for pairs with these weights [T, k]."""
        folded = self._shared_matrices() if weights.shape[1] > self._top_k else None
        first, second = folded or (None, None)
        share = weights.flatten().contiguous()
        # The first product is linear in its input, so its result can be weighted instead; such experts have no bias.
        before, after = (share, None) if self._weights_inputs else (None, share)
        return (
            {"shared": first, "bias": self.gate_up_bias, "share": before},
            {"shared": second, "bias": self.down_bias, "share": after, "scatter": True},
        )

    def _kernel_gate(self) -> Gate | None:
        """The activation, if the first product's kernel has it."""
        from chairlift.kernels.triton.experts.products import Gate

        if isinstance(self._activation, ClampedGate):
            return Gate(self._activation.alpha, self._activation.limit)
        return Gate() if self._has_gates and self._activation is F.silu else None

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        def inner(rows: Tensor) -> Tensor:
            return self.gate_up.multiply(expert, rows, self.gate_up_bias)

        def outer(rows: Tensor) -> Tensor:
            return self.down.multiply(expert, rows, self.down_bias)

        if not self.batch_invariant:
            return outer(self._activate(inner(x)))
        return in_tiles(outer, one_by_one(self._activate, in_tiles(inner, x)))

    def _activate(self, rows: Tensor) -> Tensor:
        if isinstance(self._activation, ClampedGate) or self._has_gates:
            return apply_gate(rows, self._activation)
        return self._activation(rows)
