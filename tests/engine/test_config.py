from unittest.mock import patch

from chairlift.config import EngineConfig


def test_without_an_audience_steps_on_a_gpu_may_carry_more():
    with patch("torch.cuda.is_available", return_value=True):
        config = EngineConfig(device="cuda")
        assert config.for_throughput().batch_tokens() == 2 * config.batch_tokens()
        asked = EngineConfig(device="cuda", max_batch_tokens=100)
        assert asked.for_throughput() is asked


def test_a_cpu_gains_nothing_by_longer_steps():
    config = EngineConfig(device="cpu")
    assert config.for_throughput() is config
