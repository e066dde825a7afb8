from unittest.mock import patch

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.machine_defaults import batch_tokens, for_throughput
from chairlift.errors import InvalidParameter


def test_offline_steps_on_a_gpu_are_larger():
    with patch("torch.cuda.is_available", return_value=True):
        config = EngineConfig(device="cuda")
        assert batch_tokens(for_throughput(config)) == 2 * batch_tokens(config)
        chosen = EngineConfig(device="cuda", max_batch_tokens=100)
        assert for_throughput(chosen) is chosen


def test_offline_steps_on_a_cpu_are_the_same():
    config = EngineConfig(device="cpu")
    assert for_throughput(config) is config


@pytest.mark.parametrize("quantization", ["auto", "none", None])
def test_a_quantized_head_needs_a_format(quantization: str | None) -> None:
    with pytest.raises(InvalidParameter, match=r"quantize_head.*--quantization fp8"):
        EngineConfig(quantization=quantization, quantize_head=True)
    assert EngineConfig(quantization="fp8", quantize_head=True).quantize_head
