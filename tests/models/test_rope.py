"""Every rope scaling, in both styles of config, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.layers.rope import Rope, RotaryEmbedding, rotate_
from chairlift.models import describe, rotations
from chairlift.models.config import DecoderConfig
from chairlift.models.rope_config import make_rope
from tests.models.checkpoints import assert_matches, load, make_reference, read_config, save

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PAIRS = 8
SCALINGS: dict[str, tuple[int, dict[str, Any]]] = {  # name -> max_position_embeddings, rope_scaling
    "default": (256, {"rope_type": "default"}),
    "linear": (256, {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (64, {"rope_type": "dynamic", "factor": 4.0}),
    "llama3": (
        256,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama3, one bound": (
        256,
        {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn": (256, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}),
    "yarn, every knob": (
        256,
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
    ),
    "yarn, given scale": (
        256,
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 0.9,
        },
    ),
    "longrope, long": (
        256,
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 10 for i in range(PAIRS)],
            "long_factor": [1.5 + i for i in range(PAIRS)],
            "original_max_position_embeddings": 32,
        },
    ),
    "longrope, short": (
        48,
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0 + i / 10 for i in range(PAIRS)],
            "long_factor": [1.5 + i for i in range(PAIRS)],
            "original_max_position_embeddings": 48,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_llama_with_scaling_equals_transformers(name: str, tmp_path: Path) -> None:
    positions, scaling = SCALINGS[name]
    config = transformers.LlamaConfig(
        **SIZES, max_position_embeddings=positions, rope_theta=500.0, rope_scaling=dict(scaling)
    )
    reference = make_reference(config)
    save(reference, tmp_path)
    # Longer than every trained length above, except where that is also the longest sequence.
    assert_matches(load(tmp_path), reference, min(positions, 70))


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_style_configs_mean_the_same(name: str) -> None:
    positions, scaling = SCALINGS[name]
    new = {
        "model_type": "llama",
        **SIZES,
        "max_position_embeddings": positions,
        "rope_parameters": {**scaling, "rope_theta": 500.0},
    }
    old_scaling = {**scaling, "type": scaling["rope_type"]}
    del old_scaling["rope_type"]
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 500.0, "rope_scaling": old_scaling}
    assert describe(new) == describe(old)


@pytest.mark.parametrize("old_name", ["su", "yarn", "longrope"])
def test_phi3_longrope_with_partial_rotary(old_name: str, tmp_path: Path) -> None:
    pairs = 6
    config = transformers.Phi3Config(
        **SIZES,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
        partial_rotary_factor=0.75,
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 10 for i in range(pairs)],
            "long_factor": [2.0 + i for i in range(pairs)],
        },
    )
    reference = make_reference(config)
    save(reference, tmp_path)
    saved = read_config(tmp_path)
    saved["rope_parameters"]["rope_type"] = old_name
    assert_matches(load(tmp_path, saved), reference, 40)
    assert load(tmp_path, saved).max_len == 128


def test_longrope_chooses_by_the_longest_sequence_allowed() -> None:
    positions, scaling = SCALINGS["longrope, long"]
    config = {
        "model_type": "llama",
        **SIZES,
        "max_position_embeddings": positions,
        "rope_scaling": scaling,
    }

    def slowest(max_len: int | None) -> float:
        info = describe(config, max_len=max_len)
        assert isinstance(info, DecoderConfig)
        assert info.layers[0].rope is not None
        return info.layers[0].rope.inv_freq[-1]

    base = 10_000.0 ** (-2 * (PAIRS - 1) / (2 * PAIRS))
    assert slowest(None) == pytest.approx(base / scaling["long_factor"][-1])
    assert slowest(33) == slowest(None)
    assert slowest(32) == pytest.approx(base / scaling["short_factor"][-1])


def test_max_len_cannot_exceed_the_model() -> None:
    config = {"model_type": "llama", **SIZES, "max_position_embeddings": 64}
    assert describe(config, max_len=64).max_len == 64
    with pytest.raises(InvalidParameter, match=r"max_model_len.*64"):
        describe(config, max_len=65)


def test_yarn_extends_the_trained_length() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = {"model_type": "qwen2", **SIZES, "max_position_embeddings": 64, "rope_scaling": scaling}
    assert describe(config).max_len == 256


def test_frequency_factors_divide_each_pair() -> None:
    factors = [1.0, 2.0, 4.0, 8.0]
    given_ = {"rope_type": "frequency_factors", "factors": factors, "attention_factor": 1.25}
    plain = make_rope({}, head_dim=8, max_positions=64, max_len=64)
    rope = make_rope(given_, head_dim=8, max_positions=64, max_len=64)
    assert rope.inv_freq == pytest.approx([f / d for f, d in zip(plain.inv_freq, factors, strict=True)])
    assert (plain.scale, rope.scale) == (1.0, 1.25)


def test_llama3_as_frequency_factors(tmp_path: Path) -> None:
    """What a GGUF file stores of a llama3 scaling gives the same model."""
    positions, scaling = SCALINGS["llama3"]
    reference = make_reference(
        transformers.LlamaConfig(**SIZES, max_position_embeddings=positions, rope_scaling=dict(scaling))
    )
    config = save(reference, tmp_path)
    scaled = reference.model.rotary_emb.inv_freq
    plain = make_rope({}, head_dim=16, max_positions=positions, max_len=positions)
    factors = (torch.tensor(plain.inv_freq) / scaled).tolist()
    config["rope_parameters"] = {"rope_type": "frequency_factors", "factors": factors}
    assert_matches(load(tmp_path, config), reference, 70)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown type": ({"rope_type": "spiral"}, UnsupportedModel, "spiral.*linear"),
    "no factor": ({"rope_type": "linear"}, CorruptCheckpoint, "factor is missing"),
    "zero factor": ({"rope_type": "linear", "factor": 0}, CorruptCheckpoint, "factor must be"),
    "infinite factor": ({"rope_type": "linear", "factor": float("inf")}, CorruptCheckpoint, "finite"),
    "huge base": ({"rope_theta": 10**400}, CorruptCheckpoint, "rope_theta must be"),
    "huge list": ({"rope_type": "frequency_factors", "factors": [10**400] * 4}, CorruptCheckpoint, "finite"),
    "base of one": ({"rope_theta": 1.0}, CorruptCheckpoint, "rope_theta"),
    "odd part": ({"partial_rotary_factor": 0.4}, CorruptCheckpoint, "even number of the head.s 8"),
    "too large a part": (
        {"partial_rotary_factor": 2.0},
        CorruptCheckpoint,
        "even number of the head.s 8",
    ),
    "short list": ({"rope_type": "frequency_factors", "factors": [1.0]}, CorruptCheckpoint, "4 entries"),
    "bad list": ({"rope_type": "frequency_factors", "factors": [1.0, 1.0, 0.0, 1.0]}, CorruptCheckpoint, "above 0"),
    "crossed bounds": (
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 2.0},
        CorruptCheckpoint,
        "high_freq_factor",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name: str) -> None:
    parameters, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make_rope(parameters, head_dim=8, max_positions=64, max_len=64)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 4),
    pairs=st.integers(1, 4),
    extra=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_rotation_in_place_keeps_pair_lengths(rows: int, heads: int, pairs: int, extra: int, seed: int) -> None:
    """Against complex multiplication, on a view into a larger tensor as the model uses it."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, heads + 2, 2 * pairs + extra, generator=generator)
    before = wide.clone()
    positions = torch.randint(0, 1000, (rows,), generator=generator)
    rope = Rope(tuple(0.5**i for i in range(pairs)), scale=1.5)
    rotate_(wide[:, :heads], RotaryEmbedding(rope, dtype=torch.float32, device=torch.device("cpu"))(positions))
    spin = 1.5 * torch.exp(1j * positions[:, None].double() * torch.tensor(rope.inv_freq, dtype=torch.float64))
    first, second = before[:, :heads, :pairs].double(), before[:, :heads, pairs : 2 * pairs].double()
    wanted = (first + 1j * second) * spin[:, None, :]
    torch.testing.assert_close(wide[:, :heads, :pairs].double(), wanted.real, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(wide[:, :heads, pairs : 2 * pairs].double(), wanted.imag, atol=1e-4, rtol=1e-4)
    assert torch.equal(wide[:, :heads, 2 * pairs :], before[:, :heads, 2 * pairs :])
    assert torch.equal(wide[:, heads:], before[:, heads:])


def test_what_is_kept_on_disk_depends_on_the_longest_sequence_where_rotations_do() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    plain = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=1, head_dim=16, max_position_embeddings=256
    ).to_dict()
    scaled = plain | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0} | factors}
    assert rotations(plain, 32) == rotations(plain, 256)
    assert rotations(scaled, 32) == rotations(scaled, 64)
    assert rotations(scaled, 64) != rotations(scaled, 65)
