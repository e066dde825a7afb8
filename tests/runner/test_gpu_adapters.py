"""Adapters on the GPU runner, whose steps read them from buffers on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.runner.gpu.runner import GPURunner
from tests.adapters import write_canary
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("paged_backend")

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_each_row_has_the_adapter_of_its_request(tmp_path: Path, device: torch.device) -> None:
    base = write_tiny_checkpoint(tmp_path / "base")
    canaries = {f"{token}": str(write_canary(tmp_path / f"{token}", base, token)) for token in (40, 41, 42)}
    options = {"device": device.type, "dtype": "float32", "quantization": "none", "kv_memory": "1MiB"}
    prompts = ["a chairlift", "blocks are shared, copied", "ragged", "step off", "a chairlift", "engine"]
    with LLM(str(base), progress=False, **options) as llm:
        alone = [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(str(base), progress=False, lora=canaries, max_loras=2, max_batch_requests=4, **options) as llm:
        assert isinstance(llm.runner, GPURunner)
        lora = ["40", None, "41", "42", None, "40"]
        said = [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY, lora=lora, use_tqdm=False)]
        again = [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY, use_tqdm=False)]
    for name, tokens, plain in zip(lora, said, alone, strict=True):
        assert tokens == (plain if name is None else [int(name)] * 4)
    assert again == alone, "a step of the base model has no adapters of the step before"
