from pathlib import Path
from unittest.mock import patch

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.machine_defaults import batch_tokens, for_throughput
from chairlift.engine.startup import load_model
from chairlift.errors import InvalidParameter
from tests.tiny import write_tiny_checkpoint


def test_offline_steps_on_a_gpu_are_larger():
    with patch("torch.cuda.is_available", return_value=True):
        config = EngineConfig(device="cuda")
        assert batch_tokens(for_throughput(config)) == 2 * batch_tokens(config)
        chosen = EngineConfig(device="cuda", max_batch_tokens=100)
        assert for_throughput(chosen) is chosen


def test_offline_steps_on_a_cpu_are_the_same():
    config = EngineConfig(device="cpu")
    assert for_throughput(config) is config


def test_a_quantized_head_needs_a_format(tmp_path: Path) -> None:
    problem = r"quantize_head.*--quantization fp8"
    with pytest.raises(InvalidParameter, match=problem):
        EngineConfig(quantization="none", quantize_head=True)
    config = EngineConfig(device="cpu", dtype="float32", load_format="dummy", quantize_head=True)
    with pytest.raises(InvalidParameter, match=problem):
        load_model(str(write_tiny_checkpoint(tmp_path)), config)  # auto: not quantized
    assert EngineConfig(quantization="fp8", quantize_head=True).quantize_head
