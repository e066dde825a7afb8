"""Norms and activations of single rows, for the kernel that runs all layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.kernels.cpu.compiling import FAST, compiled, exp

SILU, GELU_TANH, RELU, RELU_SQUARED, XIELU = range(5)
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_GELU_A, _GELU_B = np.float32(0.7978845608028654), np.float32(0.044715)


class Norms(NamedTuple):
    """One norm of every layer. An empty last axis means that the model has no such norm, or no bias in it."""

    weight: np.ndarray  # [L, size] float32
    bias: np.ndarray  # [L, size]


@compiled(FAST)
def norm_row(values: Any, weight: Any, eps: Any, out: Any) -> None:
    """Scale to unit mean square, then by a weight."""
    squares = _ZERO
    for i in range(values.shape[0]):
        squares += values[i] * values[i]
    factor = _ONE / np.sqrt(squares / np.float32(values.shape[0]) + eps)
    for i in range(values.shape[0]):
        out[i] = values[i] * factor * weight[i]


@compiled(FAST)
def stream_norm_row(values: Any, weight: Any, bias: Any, centers: bool, eps: Any, out: Any) -> None:
    """As `norm_row`; with `centers` the mean is subtracted first. `out` may be `values`."""
    if not centers:
        norm_row(values, weight, eps, out)
    else:
        total, size = _ZERO, np.float32(values.shape[0])
        for i in range(values.shape[0]):
            total += values[i]
        mean, squares = total / size, _ZERO
        for i in range(values.shape[0]):
            squares += (values[i] - mean) * (values[i] - mean)
        factor = _ONE / np.sqrt(squares / size + eps)
        for i in range(values.shape[0]):
            out[i] = (values[i] - mean) * factor * weight[i]
    for i in range(bias.shape[0]):
        out[i] += bias[i]


@compiled(FAST)
def gate_row(gate: Any, up: Any, activation: int, factors: Any) -> None:
    """gate = activation(gate) * up, in place; `up` is empty in blocks without a gate."""
    if activation == SILU and up.shape[0] > 0:
        for i in range(gate.shape[0]):
            gate[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]
        return
    _activate_row(gate, activation, factors)
    for i in range(up.shape[0]):
        gate[i] *= up[i]


@compiled(FAST)
def _activate_row(values: Any, activation: int, factors: Any) -> None:
    if activation == SILU:
        for i in range(values.shape[0]):
            values[i] = values[i] / (_ONE + exp(-values[i]))
    elif activation == GELU_TANH:
        for i in range(values.shape[0]):
            bent = _TWO * _GELU_A * (values[i] + _GELU_B * values[i] * values[i] * values[i])
            values[i] = values[i] * (_ONE - _ONE / (exp(bent) + _ONE))
    elif activation == RELU:
        for i in range(values.shape[0]):
            values[i] = max(values[i], _ZERO)
    elif activation == RELU_SQUARED:
        for i in range(values.shape[0]):
            positive = max(values[i], _ZERO)
            values[i] = positive * positive
    else:  # xIELU: its factors above and below zero, and of the linear part
        for i in range(values.shape[0]):
            x = values[i]
            curved = factors[0] * x * x if x > _ZERO else factors[1] * (exp(min(x, factors[3])) - _ONE - x)
            values[i] = curved + factors[2] * x
