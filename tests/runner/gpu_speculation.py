"""Engines with speculation on the GPU runner, and the reference without drafts on the CPU runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel
from chairlift.models.decoder import Decoder
from chairlift.runner.gpu.runner import GPURunner
from chairlift.speculation.head_layers import HeadConfig
from chairlift_lab.training.trainable_head import TrainableHead
from tests.speculation import running
from tests.speculation.running import Run, Work, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)


def start(tiny: LoadedModel, *given: Any, **options: Any) -> Engine:
    usual = {"device": tiny.model.device.type, "max_batch_requests": 4, "speculate": "ngram", "draft_length": 4}
    engine = running.start(tiny, *given, **usual | options)
    assert isinstance(engine.executor, GPURunner) == (options.get("attention") is None)
    return engine


def plain(tiny: LoadedModel, work: Work) -> Run:
    """Run the requests on the CPU runner without drafts."""
    return run(start(tiny, attention="bursted", speculate=None, draft_length=None), work)


def work_of(*params: SamplingParams) -> Work:
    """One request for each of `params`, with prompts of uneven lengths, some with a common prefix."""
    return [([3 + (7 * (i % 2) + j % 11) % 300 for j in range(3 + 5 * i)], one) for i, one in enumerate(params)]


def write_random_head(folder: Path, model: Decoder) -> Path:
    """A draft head with random weights, in `folder`."""
    config = HeadConfig(
        hidden_size=64,
        target_vocab_size=model.vocab_size,
        draft_vocab_size=model.vocab_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        rope_theta=10000.0,
        max_position_embeddings=256,
        taps=(1,),
    )
    torch.manual_seed(1)
    tensors = {name: tensor.cpu() for name, tensor in TrainableHead(config, model).tensors().items()}
    save_file(tensors | {"token_ids": torch.arange(model.vocab_size)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder
