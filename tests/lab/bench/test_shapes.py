"""`bench shapes`: the arithmetic of the floor, and a run on a tiny shape."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift.layers import linear
from chairlift.layers.formats import FORMATS
from chairlift.models import describe
from chairlift_lab.common import cpu_kernels, floor
from chairlift_lab.common.floor import Ceilings, Mixture, ModelCost, ceilings_for, floor_seconds
from chairlift_lab.common.model_shapes import SHAPES, VOCABULARY, config_file, make_cases, warm_up_of
from tests.kernels.tiny_config import CONFIG
from tests.models.tiny_configs import tiny_config


def test_floor_counts_weights_cache_and_prompts() -> None:
    cost = ModelCost(step_bytes=1000, token_flops=50, kv_bytes=10)
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=25.0)
    # Three steps; the second token sees 5 tokens and the third 6, themselves included; 4 prompt tokens are computed.
    expected = (3 * 1000 + (5 + 6) * 10) / 100 + 4 * 50 / 25
    assert floor_seconds([4], [3], cost, ceilings) == pytest.approx(expected)


def test_floor_counts_the_experts_that_the_tokens_of_a_step_use() -> None:
    mixture = Mixture(count=4, per_token=1, expert_bytes=100.0)
    cost = ModelCost(step_bytes=1000, token_flops=0, kv_bytes=0, mixtures=[mixture])
    ceilings = Ceilings(bytes_per_second=1.0, flops_per_second=1.0)
    # Two tokens use the same expert in one of four cases; the second request ends after one step.
    assert [mixture.read_bytes(tokens) for tokens in (1, 2)] == [100, 175]
    assert floor_seconds([1, 1], [2, 1], cost, ceilings) == pytest.approx(2 * 1000 + 175 + 100)


def test_floor_counts_what_windows_leave_and_states_twice() -> None:
    cost = ModelCost(step_bytes=0, token_flops=0, kv_bytes=10, window_bytes={6: 4, 100: 1}, state_bytes=7)
    ceilings = Ceilings(bytes_per_second=1.0, flops_per_second=1.0)
    contexts = [5, 6, 7, 8]
    expected = sum(5 * one + 4 * min(one, 6) + min(one, 100) for one in contexts) + 4 * 2 * 7
    assert floor_seconds([4], [5], cost, ceilings) == pytest.approx(expected)
    assert floor_seconds([4], [1], cost, ceilings) == 0


def test_ceilings_are_measured_in_the_precision_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(cpu_kernels, "cpu_ceilings", lambda *how: asked.append(how))
    monkeypatch.setattr(Ceilings, "measure", lambda *how: asked.append(how))
    rounded = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, quantization="int8")
    ceilings_for(rounded)
    assert asked.pop() == (torch.float32, "int8")
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, quantization="fp8")
    ceilings_for(on_gpu)
    assert asked.pop() == (on_gpu.device, torch.bfloat16, "fp8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no numba
    plain = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    ceilings_for(plain)
    assert asked.pop() == (plain.device, torch.float32, "none")


def test_ceilings_of_fp8_are_measured_with_fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    formats: list[object] = []

    class RecordedLinear:
        def __init__(self, weight: torch.Tensor, *, format: object) -> None:
            formats.append(format)

        def finalize(self) -> None:
            pass

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    monkeypatch.setattr(floor, "best_seconds", lambda run, device: 1.0 if run() is None else 0.5)
    monkeypatch.setattr(linear, "Linear", RecordedLinear)
    assert Ceilings.measure(torch.device("cpu"), torch.bfloat16, "fp8").flops_per_second == 2 * 1024**3 / 0.5
    assert formats == [FORMATS.get("fp8")]


def test_cases_have_the_lengths_of_their_names() -> None:
    decode, load, prefill = make_cases(["decode-3", "load-5", "prefill-2"], vocab=50)
    assert [len(prompt) for prompt in decode.prompts] == [128] * 3
    assert decode.outputs == [256] * 3
    assert all(100 <= len(prompt) <= 1024 for prompt in load.prompts)
    assert (len(prefill.prompts[1]), prefill.outputs) == (2048, [1, 1])
    assert make_cases(["load-5"], vocab=50) == [load]
    assert make_cases(["load-5-0"], vocab=50)[0].prompts == load.prompts
    assert make_cases(["load-5-1"], vocab=50)[0].prompts != load.prompts
    names = ["decode-1", "decode-3", "load-5", "load-5-1", "prefill-1", "prefill-3"]
    starts = [tuple(prompt[:16]) for case in make_cases(names, vocab=10_000) for prompt in case.prompts]
    assert len(set(starts)) == len(starts)  # no prompt of a case is cached by another
    for unknown in ("decode", "load-0", "load-5-", "load-5-1-2", "decode-5-1", "prefill-5-1", "chat-5"):
        with pytest.raises(InvalidParameter, match="cases"):
            make_cases([unknown], vocab=50)


def test_loads_are_those_of_the_public_workload() -> None:
    source = random.Random(3)
    prompts = [[source.randint(0, 10_000) for _ in range(source.randint(100, 1024))] for _ in range(20)]
    outputs = [source.randint(100, 1024) for _ in range(20)]
    (case,) = make_cases(["load-20-3"], vocab=VOCABULARY)
    assert (case.prompts, case.outputs) == (prompts, outputs)


def test_a_warm_up_has_the_lengths_of_its_case_and_no_common_prefix() -> None:
    (case,) = make_cases(["load-300"], vocab=VOCABULARY)
    warm_up = warm_up_of(case)
    assert [len(prompt) for prompt in warm_up.prompts] == [len(prompt) for prompt in case.prompts[:256]]
    assert all(one[:16] != other[:16] for one, other in zip(warm_up.prompts, case.prompts, strict=False))
    assert set(warm_up.outputs) == {6}


@pytest.mark.parametrize("family", ["qwen3_5_text", "gpt_oss", "mamba2", "deepseek_v2"])
def test_tiny_models_of_other_kinds(family: str, tmp_path: Path) -> None:
    tiny_config(family).to_json_file(tmp_path / "config.json")
    result = tmp_path / "result.json"
    options = f"--device cpu --dtype float32 --cases decode-2 --scale 32 --slots 2 --json {result}"
    outcome = CliRunner().invoke(app, f"bench shapes {tmp_path} {options}".split())
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(result.read_text())["rows"]
    assert row["output_tokens"] == 2 * 256 // 32
    assert 0 < row["share_of_floor"] < 1


def test_a_tiny_shape_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = tmp_path / "result.json"
    plot = tmp_path / "plot.png"
    command = (
        f"bench shapes {tmp_path} --device cpu --cases decode-2,prefill-1 --scale 32 --json {result} --plot {plot}"
    )
    outcome = CliRunner().invoke(app, command.split())
    assert outcome.exit_code == 0, outcome.output
    rows = {row["name"]: row for row in json.loads(result.read_text())["rows"]}
    assert rows["decode-2"]["output_tokens"] == 2 * 256 // 32
    assert rows["prefill-1"]["prompt_tokens"] == 2048 // 32
    assert 0 < rows["decode-2"]["share_of_floor"] < 1
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_with_fewer_layers_is_a_model(shape: str) -> None:
    with config_file(shape) as path:
        whole = describe(json.loads(Path(path).read_text()))
    with config_file(shape, layers=5) as path:
        shorter = describe(json.loads(Path(path).read_text()))
    counts = [len(info.attention_layers) + len(info.recurrent_layers) for info in (shorter, whole)]
    assert 1 <= counts[0] <= 5 < counts[1]
    assert shorter.num_parameters < whole.num_parameters


def test_a_folder_is_shortened_like_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama3-8b"]))
    for shape in (tmp_path, tmp_path / "config.json"):
        with config_file(str(shape), layers=3) as path:
            assert json.loads(Path(path).read_text()) == SHAPES["llama3-8b"] | {"num_hidden_layers": 3}


@pytest.mark.parametrize("layers", [0, 1000])
def test_layers_that_a_shape_does_not_have_are_refused(layers: int) -> None:
    with (
        pytest.raises(InvalidParameter, match="layers: must be between 1 and"),
        config_file("llama3-8b", layers=layers),
    ):
        pass
