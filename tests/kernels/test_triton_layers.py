"""The fused small operations against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton.layers import (
    add_gated_,
    add_rms_norm_,
    begin_step,
    rms_norm,
    rotate_and_store_,
    rotation,
    silu_mul,
)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]; cos, sin [T, pairs]."""
    pairs = cos.shape[1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("size", [8, 100, 576])
def test_norms(size: int, device: torch.device) -> None:
    x, delta = (torch.randn(5, size, device=device) for _ in range(2))
    weight = torch.randn(size, device=device)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), normed(x.double(), weight.double(), 1e-5), rtol=1e-5, atol=1e-5
    )
    within = torch.randn(5, 3 * size, device=device)[:, size : 2 * size]  # as queries lie within a projection
    torch.testing.assert_close(
        rms_norm(within, weight, 1e-5).double(), normed(within.double(), weight.double(), 1e-5), rtol=1e-5, atol=1e-5
    )
    total = x.double() + delta.double()
    found = add_rms_norm_(x, delta, weight, 1e-5)
    torch.testing.assert_close(x.double(), total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.double(), normed(total, weight.double(), 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [16, 100, 1536])
def test_silu_mul(size: int, device: torch.device) -> None:
    gate_up = torch.randn(3, 2 * size, device=device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(silu_mul(gate_up).double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "depth"), [(16, 16), (100, 40), (1536, 100)])
def test_add_gated(size: int, depth: int, device: torch.device) -> None:
    total, x = (torch.randn(3, size, device=device) for _ in range(2))
    rows, gate = torch.randn(3, depth, device=device), torch.randn(1, depth, device=device)
    expected = total.double() + (rows.double() @ gate.double().T).sigmoid() * x.double()
    assert add_gated_(total, x, rows, gate) is total
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "pairs"), [(4, 2, 16, 8), (3, 1, 32, 4), (9, 3, 24, 12), (2, 2, 8, 0)]
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate_and_store(
    heads: int, kv_heads: int, dim: int, pairs: int, with_norm: bool, device: torch.device
) -> None:
    torch.manual_seed(pairs)
    total, rows, block_size = heads + 2 * kv_heads, 5, 4
    qkv = torch.randn(rows, total * dim, device=device)
    before = qkv.clone().double().view(rows, total, dim)
    keys, values = (torch.full((6, block_size, kv_heads, dim), 7.0, device=device) for _ in range(2))
    q_norm, k_norm = (torch.randn(dim, device=device) for _ in range(2))
    angles = torch.randn(rows, pairs, device=device)
    slots = torch.tensor([1, 1, 0, 0, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([3, 4, 9, -1, 0], dtype=torch.int32, device=device)
    tables = torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32, device=device)
    rotate_and_store_(
        qkv,
        keys,
        values,
        num_heads=heads,
        q_norm=q_norm if with_norm else None,
        k_norm=k_norm if with_norm else None,
        eps=1e-6,
        cos=angles.cos() if pairs else None,
        sin=angles.sin() if pairs else None,
        slots=slots,
        positions=positions,
        tables=tables,
    )
    q, k, v = before.split((heads, kv_heads, kv_heads), dim=1)
    if with_norm:
        q, k = normed(q, q_norm.double(), 1e-6), normed(k, k_norm.double(), 1e-6)
    q, k = (rotated(x, angles.double().cos(), angles.double().sin()) for x in (q, k))
    expected_keys, expected_values = (torch.full_like(keys, 7.0, dtype=torch.float64) for _ in range(2))
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if position < 0:
            continue
        block = int(tables[slot, position // block_size])
        expected_keys[block, position % block_size] = k[row]
        expected_values[block, position % block_size] = v[row]
    torch.testing.assert_close(keys.double(), expected_keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.double(), expected_values, rtol=1e-5, atol=1e-5)
    used = positions >= 0
    found = qkv.double().view(rows, total, dim)[:, :heads]
    torch.testing.assert_close(found[used], q[used], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pairs", [4, 48])
def test_rotation(pairs: int, device: torch.device) -> None:
    """Includes angles of long contexts, which are many turns."""
    positions = torch.tensor([0, 1, 77, 4095, 131_071], dtype=torch.int32, device=device)
    inv_freq = 10_000.0 ** -(torch.arange(pairs, device=device) / pairs)
    cos, sin = rotation(positions, inv_freq, 1.5, torch.float32)
    angles = (positions.float()[:, None] * inv_freq).double()  # rounded to float32, as in training
    torch.testing.assert_close(cos[:, 0].double(), angles.cos() * 1.5, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[:, 0].double(), angles.sin() * 1.5, rtol=0, atol=1e-5)


def test_begin_step_resolves_tokens_and_updates_tables(device: torch.device) -> None:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = torch.zeros(3, 4, dtype=torch.int32, device=device)
    last = ints(9, -1, 5)
    found = begin_step(ints(3, -1, 10, -1), ints(0, 2, 0, 1), last, ints(1, 6, 11), ints(7, 8, 9), tables)
    assert found.tolist() == [3, 5, 10, 0]
    assert tables.tolist() == [[0, 7, 0, 0], [0, 0, 8, 0], [0, 0, 0, 9]]
