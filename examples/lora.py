"""Several LoRA adapters over one base model, in one batch: `python examples/lora.py poet=adapters/poet`.

Without arguments, an adapter is made that changes the queries of the first layer at random.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from chairlift import LLM, SamplingParams


def write_random_adapter(folder: Path, llm: LLM) -> None:
    """Write what PEFT writes: a config, and two matrices for each adapted linear map."""
    layer, hidden = llm.runner.model.attention_layers[0], llm.runner.model.hidden_size
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": 0.3 * torch.randn(8, hidden),
        f"{module}.lora_B.weight": 0.3 * torch.randn(layer.num_heads * layer.head_dim, 8),
    }
    save_file(tensors, folder / "adapter_model.safetensors")


adapters = dict(argument.split("=", 1) for argument in sys.argv[1:])
llm = LLM(os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m"), lora=adapters, max_loras=8)
with tempfile.TemporaryDirectory() as folder:
    if not adapters:
        write_random_adapter(Path(folder), llm)
        llm.load_lora("random", folder)
    names = [None, *llm.loras]
    params = SamplingParams(temperature=0, max_tokens=24)
    results = llm.generate(["The sea is"] * len(names), params, lora=names, use_tqdm=False)
    for name, result in zip(names, results, strict=True):
        print(f"{name or 'the base model'} -> {result.outputs[0].text!r}")
