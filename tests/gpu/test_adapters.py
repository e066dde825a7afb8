"""Adapters on a GPU: in captured steps, mixed, loaded and evicted while steps are in flight."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.integrity import check_accounting
from tests.adapters import merge, write_canary, write_random
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = ["a chairlift never stops", "blocks are shared, copied on write and freed in the same step " * 4, "ragged"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("gpu_adapters") / "base", head_dim=64)


@pytest.mark.parametrize("graphs", [True, False])
def test_float32_says_what_merged_weights_say(base: Path, graphs: bool, tmp_path: Path) -> None:
    options = {"device": "cuda", "dtype": "float32", "kv_memory": "64MiB", "cuda_graphs": graphs, "progress": False}
    adapters = {f"{rank}": write_random(tmp_path / f"{rank}", base, rank, seed=rank, scale=0.2) for rank in (4, 64)}
    expected = {}
    for name in (None, *adapters):
        folder = base if name is None else merge(tmp_path / f"merged-{name}", base, {adapters[name]: 1.0})
        with LLM(str(folder), **options) as llm:
            results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            expected |= {
                (prompt, name): result.outputs[0].token_ids for prompt, result in zip(PROMPTS, results, strict=True)
            }
    pairs = [*expected] * 3
    with LLM(str(base), lora={name: str(path) for name, path in adapters.items()}, **options) as llm:
        results = llm.generate(
            [prompt for prompt, _ in pairs], GREEDY, lora=[name for _, name in pairs], use_tqdm=False
        )
        assert [result.outputs[0].token_ids for result in results] == [expected[pair] for pair in pairs]


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_no_canary_sings_in_the_request_of_another(base: Path, quantization: str, tmp_path: Path) -> None:
    chosen = range(20, 50)
    canaries = {f"canary-{token}": str(write_canary(tmp_path / f"{token}", base, token)) for token in chosen}
    generator = random.Random(3)
    names = [generator.choice([None, *canaries]) for _ in range(600)]
    prompts = [" ".join(generator.choices(PROMPTS[1].split(), k=generator.randint(1, 40))) for _ in names]
    params = [SamplingParams(temperature=0.0, max_tokens=generator.randint(1, 6), ignore_eos=True) for _ in names]
    options = {"device": "cuda", "dtype": "bfloat16", "quantization": quantization, "kv_memory": "64MiB"}
    with LLM(str(base), lora=canaries, max_loras=8, progress=False, **options) as llm:
        llm.runner.capture_decodes([64])
        results = llm.generate(prompts, params, lora=names, use_tqdm=False)
        check_accounting(llm.engine.scheduler)
        assert llm.engine.scheduler.adapters.num_evictions > 0
    for name, result in zip(names, results, strict=True):
        said = set(result.outputs[0].token_ids)
        assert said == {int(name.removeprefix("canary-"))} if name else not said <= set(chosen)
