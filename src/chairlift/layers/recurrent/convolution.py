"""The short causal convolution at the start of a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, StateSpec
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.parts import Targets


def inputs_spec(channels: int, width: int) -> StateSpec:
    """The state of a convolution: the inputs of the last rows, oldest first."""
    return StateSpec("convolution", (width - 1, channels), torch.float32)


class CausalConvolution:
    """Each channel with a filter of its own over the last `width` rows; then silu, if the layer has it."""

    def __init__(self, channels: int, width: int, *, bias: bool, silu: bool, device: torch.device) -> None:
        self.weight = torch.empty(width, channels, dtype=torch.float32, device=device)
        self.bias = torch.empty(channels, dtype=torch.float32, device=device) if bias else None
        self.silu = silu

    def targets(self, names: Sequence[str], sizes: Sequence[int] | None = None) -> Targets:
        """Checkpoints have [channels, 1, width]; one that holds the filters in parts has a name and a size for each."""
        sizes = [self.weight.shape[1]] if sizes is None else list(sizes)
        for name, part in zip(names, self.weight.t().unsqueeze(1).split(sizes), strict=True):
            yield f"{name}.weight", part
        if self.bias is not None:
            for name, part in zip(names, self.bias.split(sizes), strict=True):
                yield f"{name}.bias", part

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def finalize(self) -> None:
        """Nothing to do: the filters stay in float32."""

    def make_batch_invariant(self) -> None:
        """Nothing to do: a row depends on the rows of its sequence only."""

    def __call__(self, x: Tensor, batch: RecurrentBatch, state: Tensor) -> Tensor:
        """x [T, channels], maybe columns of a wider tensor -> [T, channels]; float32 on a CPU."""
        if on_gpu(x.device):
            from chairlift.kernels.triton.recurrent.convolution import convolve

            return convolve(x, self.weight, self.bias, state, batch, silu=self.silu)
        from chairlift.kernels.cpu.recurrence import run_convolution  # numba is slow to import
        from chairlift.layers.recurrent.host import on_host

        return run_convolution(x, self.weight, self.bias, state, on_host(batch), silu=self.silu)
