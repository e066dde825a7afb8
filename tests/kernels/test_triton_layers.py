"""The fused small operations against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.triton.decode import Fresh
from chairlift.kernels.triton.layers import add_gated_, begin_step, rotate_and_store_, rotation
from chairlift.kernels.triton.norms import add_rms_norm_, norm_parts_, per_layer_inputs_, rms_norm
from chairlift.kernels.triton.products.activation import gated_mul, softcap


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


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("with_after", [False, True])
@pytest.mark.parametrize("with_scalar", [False, True])
def test_norms_of_what_is_added(with_norm: bool, with_after: bool, with_scalar: bool, device: torch.device) -> None:
    x, delta = (torch.randn(4, 100, device=device) for _ in range(2))
    weight, after = (torch.randn(100, device=device) for _ in range(2))
    scalar = torch.tensor([0.3], device=device)
    total = x.double() + (normed(delta.double(), after.double(), 1e-2) if with_after else delta.double())
    total *= 0.3 if with_scalar else 1.0
    found = add_rms_norm_(
        x,
        delta,
        weight if with_norm else None,
        1e-5,
        after=after if with_after else None,
        after_eps=1e-2,
        scalar=scalar if with_scalar else None,
    )
    torch.testing.assert_close(x.double(), total, rtol=1e-5, atol=1e-5)
    expected = normed(total, weight.double(), 1e-5) if with_norm else total
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert with_norm == (found is not x)


def test_norms_of_queries_and_keys_as_a_whole(device: torch.device) -> None:
    qkv = torch.randn(3, 100, device=device)
    queries, keys, values = qkv.double().split((60, 24, 16), dim=1)
    q_weight, k_weight = torch.randn(60, device=device), torch.randn(24, device=device)
    expected = torch.cat((normed(queries, q_weight.double(), 1e-4), normed(keys, k_weight.double(), 1e-4)), dim=1)
    norm_parts_(qkv, q_weight, k_weight, 1e-4)
    torch.testing.assert_close(qkv[:, :84].double(), expected, rtol=1e-5, atol=1e-5)
    assert qkv[:, 84:].double().equal(values)


def test_inputs_of_layers(device: torch.device) -> None:
    layers, size = 3, 12
    table, projected = (torch.randn(rows, layers * size, device=device) for rows in (9, 4))
    tokens = torch.tensor([8, 0, 3, 3], dtype=torch.int32, device=device)
    weight = torch.randn(size, device=device)
    rows = (projected.double() * 0.4).view(4, layers, size)
    stored = table.double()[tokens.long()].view(4, layers, size)
    expected = 0.7 * (normed(rows, weight.double(), 1e-4) + 1.5 * stored)
    per_layer_inputs_(tokens, table, projected, weight, 1e-4, projected_scale=0.4, stored_scale=1.5, scale=0.7)
    torch.testing.assert_close(projected.double().view(4, layers, size), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [16, 100, 1536])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mul(size: int, activation: str, device: torch.device) -> None:
    gate_up = torch.randn(3, 2 * size, device=device) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(gated_mul(gate_up, activation).double(), wanted * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap(dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(3, 5000, device=device) * 40).to(dtype)
    logits[0, 0] = 3000.0
    found = softcap(logits, 30.0)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), 30.0 * torch.tanh(logits.double() / 30.0), rtol=1e-5, atol=1e-5)
    assert softcap(logits[:0], 30.0).shape == (0, 5000)


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
@pytest.mark.parametrize(("with_norm", "v_norm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("new_heads", [0, 1, 2])
def test_rotate_and_store(
    heads: int,
    kv_heads: int,
    dim: int,
    pairs: int,
    with_norm: bool,
    v_norm: bool,
    new_heads: int,
    device: torch.device,
) -> None:
    torch.manual_seed(pairs)
    total, rows, block_size = heads + new_heads * kv_heads, 5, 4
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
        Fresh(
            q_norm if with_norm else None,
            k_norm if with_norm else None,
            1e-6,
            angles.cos() if pairs else None,
            angles.sin() if pairs else None,
            v_norm,
        ),
        num_heads=heads,
        slots=slots,
        positions=positions,
        tables=tables,
    )
    q, *new = before.split((heads, *[kv_heads] * new_heads), dim=1)
    k, v = (new[0], new[-1]) if new else (before[:, :0], before[:, :0])
    if with_norm:
        q, k = normed(q, q_norm.double(), 1e-6), normed(k, k_norm.double(), 1e-6)
    if v_norm:
        v = normed(v, torch.ones(dim, device=device), 1e-6)
    q, k = (rotated(x, angles.double().cos(), angles.double().sin()) for x in (q, k))
    expected_keys, expected_values = (torch.full_like(keys, 7.0, dtype=torch.float64) for _ in range(2))
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if position < 0 or not new_heads:
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
