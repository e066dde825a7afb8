"""Models with 8-bit weights: the fused kernel against the layers one by one, both against full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import choose_backend
from chairlift.attention.batch import Embeddings, RaggedLayout, StepBatch
from chairlift.attention.storage import KVStorage
from chairlift.config import EngineConfig
from chairlift.engine import settings
from chairlift.engine.settings import check_kv_dtype
from chairlift.engine.startup import load_model, start_engine
from chairlift.errors import InvalidParameter
from chairlift.kernels.cpu import simd
from chairlift.models.decoder import Decoder
from chairlift.runner.memory import allocate_storage
from tests.api.conftest import run_greedy
from tests.models.checkpoints import CPU, VOCAB, load, make_reference, prompts, run_alone, save
from tests.models.test_families import CONFIGS
from tests.tiny import write_tiny_checkpoint

FUSED = [
    "llama gqa",
    "llama mqa, tied, biases",
    "mistral",
    "qwen2 window",
    "qwen3",
    "smollm3",
    "phi3 partial rotary",
    "gemma2",
    "gemma3",
    "granite",
    "glm4",
    "olmo3",
    "exaone4",
    "hunyuan",
    "cohere2",
    "nemotron",
    "phi",
    "apertus",
]
NOT_FUSED = ["llama wide heads, gelu", "cohere qk norm", "ministral3"]
BLOCK = 4
# The fused kernel is compiled for each type of the cache, which takes long. By default it is bfloat16.
CACHES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]


def empty_storage(model: Any, num_blocks: int, dtype: torch.dtype = torch.float32) -> KVStorage:
    return allocate_storage(model.attention_layers, num_blocks - 1, BLOCK, dtype, CPU)


def run(model: Any, attention: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits of all tokens of two prompts, the first in two chunks, and of a decode of both."""
    backend = choose_backend(attention, model.attention_layers, CPU, torch.float32)
    storage = empty_storage(model, 20, dtype)
    tables = torch.tensor([[7, 3, 11, 0, 5, 9, 2], [1, 8, 4, 12, 6, 10, 13]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (2, 28), generator=generator)
    found = []
    for chunks in ([(0, 13), (0, 6)], [(13, 21), (6, 8)], [(21, 22), (8, 9)], [(22, 23), (9, 10)]):
        starts, ends = zip(*chunks, strict=True)
        counts = [end - start for start, end in chunks]
        positions = torch.cat([torch.arange(start, end) for start, end in chunks])
        owner = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
        slots = tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        layout = RaggedLayout([0, counts[0], sum(counts)], starts, ends, tables, slots)
        batch = StepBatch(tokens[owner, positions], positions, layout)
        hidden = model.hidden_states(batch, backend.begin(batch, storage)).last
        found.append(model.logits(hidden))
        for rows in ([], [counts[0] - 1, sum(counts) - 1], list(range(sum(counts)))[::-2]):
            wanted = torch.tensor(rows, dtype=torch.int32)
            some = model.hidden_states(batch, backend.begin(batch, storage), wanted).last
            torch.testing.assert_close(model.logits(some), found[-1][wanted.long()], atol=1e-4, rtol=1e-4)
    return torch.cat(found)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("name", [*FUSED, *NOT_FUSED])
@torch.inference_mode()
def test_int8_models_stay_close_to_full_precision(name: str, cache: torch.dtype, tmp_path: Path) -> None:
    config = save(make_reference(CONFIGS[name]()), tmp_path)
    exact, rounded = load(tmp_path, config), load(tmp_path, config, quantization="int8")
    assert rounded.num_weight_bytes() < exact.num_weight_bytes()
    assert isinstance(rounded, Decoder)
    assert rounded.program.is_one_kernel == (name in FUSED)
    assert rounded.has_own_threads
    reference, fused, by_layers = run(exact, "ragged"), run(rounded, "ragged", cache), run(rounded, "bursted", cache)
    spread = reference.std()
    assert (run(exact, "bursted") - reference).abs().max() < 1e-4 * spread

    def errors(found: Tensor, expected: Tensor) -> Tensor:
        """Per row: a mean over all rows would hide one that is wrong."""
        return (found - expected).abs().mean(dim=1) / spread

    # The integers are the same, but rounding may differ where sums differ in the last bit.
    assert errors(fused, by_layers).max() < 0.03
    assert errors(fused, reference).min() > 0
    assert errors(fused, reference).max() < (0.1 if cache is torch.float32 else 0.11)  # the cache is rounded, too
    if cache is torch.bfloat16:
        assert 0 < errors(fused, run(rounded, "bursted", torch.float32)).max() < 0.1


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("name", ["qwen3", "cohere qk norm"])  # fused, not fused
@torch.inference_mode()
def test_bfloat16_models_stay_close_to_full_precision(name: str, cache: torch.dtype, tmp_path: Path) -> None:
    config = save(make_reference(CONFIGS[name]()), tmp_path)
    exact, rounded = load(tmp_path, config), load(tmp_path, config, quantization="bfloat16")
    assert isinstance(rounded, Decoder)
    assert rounded.program.is_one_kernel == (name in FUSED)
    assert rounded.kv_dtype is torch.bfloat16
    reference, fused, by_layers = run(exact, "ragged"), run(rounded, "ragged", cache), run(rounded, "bursted", cache)
    assert (fused - by_layers).abs().mean(dim=1).max() < 0.005 * reference.std()
    # All that differs from torch's bfloat16 is more exact here.
    (tokens,) = prompts(40)
    expected, found, by_torch = (
        run_alone(model, tokens).float() for model in (exact, rounded, load(tmp_path, config, dtype=torch.bfloat16))
    )
    assert 0 < (found - expected).abs().mean() < (by_torch - expected).abs().mean()


def test_bfloat16_on_a_cpu_is_a_format_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is float32, so that steps run in one kernel with our attention."""
    monkeypatch.setattr(settings, "MIN_INT8_PARAMETERS", 0)
    monkeypatch.setattr(simd, "HAS_BF16", True)
    monkeypatch.setattr(simd, "HAS_AMX", False)
    folder = str(write_tiny_checkpoint(tmp_path / "tiny"))
    config = EngineConfig(device="cpu", dtype="bfloat16", kv_memory="4MiB", attention="ragged", prefix_caching=False)
    loaded = load_model(folder, config, progress=False)
    model: Any = loaded.model
    assert (model.quantization, model.dtype, model.kv_dtype) == ("bfloat16", torch.float32, torch.bfloat16)
    prompts = [[5, 9, 3, 7], list(range(3, 60))]
    together = run_greedy(start_engine(loaded, config).engine, prompts, 8).outputs
    assert together == [run_greedy(start_engine(loaded, config).engine, [one], 8).outputs[0] for one in prompts]
    with pytest.raises(InvalidParameter, match=r"quantization.*float32"):
        load_model(folder, EngineConfig(device="cpu", dtype="float16", quantization="bfloat16"), progress=False)
    monkeypatch.setattr(simd, "HAS_AMX", True)
    assert load_model(folder, config, progress=False).model.quantization == "none", "torch's products are faster there"


@torch.inference_mode()
def test_requested_rows_of_a_long_context(tmp_path: Path) -> None:
    """The context is long enough that its attention is split."""
    model = load(tmp_path, save(make_reference(CONFIGS[FUSED[0]]()), tmp_path), quantization="int8")
    backend = choose_backend("ragged", model.attention_layers, CPU, torch.float32)
    length = 600
    storage = empty_storage(model, length // BLOCK, torch.bfloat16)
    table = torch.arange(length // BLOCK, dtype=torch.int32)[None]
    tokens = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(4))

    def step(start: int, end: int, rows: list[int] | None) -> Tensor:
        positions = torch.arange(start, end)
        layout = RaggedLayout([0, end - start], [start], [end], table, positions)
        wanted = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        batch = StepBatch(tokens[start:end], positions % model.max_len, layout)
        return model.hidden_states(batch, backend.begin(batch, storage), wanted).last

    step(0, 590, [])
    whole = step(590, 600, None)
    for rows in ([9], [0, 9], [7, 3, 8], list(range(10))):
        assert torch.equal(step(590, 600, rows), whole[rows])
    for rows in ([10], [-1], [3, 3]):
        with pytest.raises(IndexError, match="different ones of 10"):
            step(590, 600, rows)


def test_int8_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = save(make_reference(CONFIGS["mixtral"]()), tmp_path)
    with pytest.raises(InvalidParameter, match=r"quantization.*float32"):
        load(tmp_path, config, quantization="int8", dtype=torch.bfloat16)
    with pytest.raises(InvalidParameter, match="unknown 'int3'"):
        EngineConfig(quantization="int3")
    with pytest.raises(InvalidParameter, match="kv_dtype: unknown 'int4'"):
        EngineConfig(kv_dtype="int4")
    with pytest.raises(InvalidParameter, match="kv_dtype: int8 is not possible"):
        check_kv_dtype("int8", torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("attention", BACKENDS.names())
@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("float32", marks=pytest.mark.slow), "int8"])
def test_tokens_do_not_depend_on_other_rows(attention: str, kv_dtype: str, tmp_path: Path) -> None:
    """Bit for bit, because every row has its own scales."""
    try:
        choose_backend(attention, [], CPU, torch.float32)
    except InvalidParameter:
        pytest.skip("not a backend of the CPU")
    name = str(write_tiny_checkpoint(tmp_path / "tiny"))
    config = EngineConfig(
        quantization="int8",
        kv_dtype=kv_dtype,
        attention=attention,
        kv_memory="4MiB",
        device="cpu",
        prefix_caching=False,
    )
    loaded = load_model(name, config, progress=False)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (5, 40, 1, 17, 90, 3, 64, 33)]
    together = run_greedy(start_engine(loaded, config).engine, prompts, 12).outputs
    alone = [run_greedy(start_engine(loaded, config).engine, [prompt], 12).outputs[0] for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize("quantization", ["int8", "none"])
@torch.inference_mode()
def test_rows_given_as_vectors_replace_the_lookup(tmp_path: Path, quantization: str) -> None:
    """As the parts of a prompt that are images will be; layers in one kernel and one by one."""
    model = load(tmp_path, save(make_reference(CONFIGS["gemma2"]()), tmp_path), quantization=quantization)
    backend = choose_backend("ragged", model.attention_layers, CPU, torch.float32)
    tokens, positions = torch.arange(3, 15), torch.arange(12)
    layout = RaggedLayout([0, 12], [0], [12], torch.arange(3, dtype=torch.int32)[None], positions)

    def logits(batch: StepBatch) -> Tensor:
        return model.logits(
            model.hidden_states(batch, backend.begin(batch, empty_storage(model, 4, torch.bfloat16))).last
        )

    expected = logits(StepBatch(tokens, positions, layout))
    rows, without = torch.tensor([1, 4, 5, 11]), tokens.clone()
    without[rows] = 0
    given = Embeddings(rows, model.embed(tokens[rows]))
    assert logits(StepBatch(without, positions, layout, embeddings=given)).equal(expected)
    assert not logits(StepBatch(without, positions, layout)).equal(expected)


@pytest.mark.parametrize("quantization", ["int8", "int4", "blocks"])
@torch.inference_mode()
def test_experts_of_checkpoints_are_rounded_on_a_cpu(quantization: str, tmp_path: Path) -> None:
    """Their products are those of the rounded weights, of activations in 8 bits."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "vocab_size": VOCAB, "num_hidden_layers": 2}
    reference = make_reference(transformers.Qwen3MoeConfig(**(sizes | experts), head_dim=16, intermediate_size=96))
    config = save(reference, tmp_path)
    exact, rounded = load(tmp_path, config), load(tmp_path, config, quantization=quantization)
    for layer, plain in zip(rounded.layers, exact.layers, strict=True):
        for weights, whole in (
            (layer.mixture.gate_up, plain.mixture.gate_up),
            (layer.mixture.down, plain.mixture.down),
        ):
            assert weights.in_blocks
            per_weight = weights.num_bytes / weights.shape.numel()
            assert per_weight < (0.9 if quantization == "int4" else 1.45)  # padded to whole units
            for expert, weight in enumerate(weights._experts):
                values = weight.rows(torch.arange(weight.out_features))
                error = (values - whole.plain[expert]).norm() / whole.plain[expert].norm()
                assert error < (0.1 if quantization == "int4" else 0.01)
                rows = torch.randn(7, weight.in_features)
                product = weights.multiply(expert, rows, None)
                expected = rows @ values.T
                assert float((product - expected).norm() / expected.norm()) < 0.02
    tokens = prompts(1, 23)[1]
    found, right = (run_alone(model, tokens) for model in (rounded, exact))
    alike = torch.cosine_similarity(found, right, dim=-1)
    assert alike.median() > (0.97 if quantization == "int4" else 0.999)  # A few tokens get other experts.
