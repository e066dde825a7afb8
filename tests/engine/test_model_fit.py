"""Whether a model fits a machine with a given amount of free memory, in which format, and what fits in its place."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.engine import memory_plan, model_fit
from chairlift.engine.model_check import check_model
from chairlift.engine.model_fit import Fit, fit_model
from chairlift.engine.settings import Machine
from chairlift.loading.known_models import known_models
from tests.api.cli_runner import run

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_models(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(Machine, "has_fast_int8", True)


def on_cpu_with(free: float, name: str, monkeypatch: pytest.MonkeyPatch) -> Fit:
    for module in (model_fit, memory_plan):
        monkeypatch.setattr(module, "free_memory", lambda device, mapped=0: int(free))
    return fit_model(name, check_model(name), EngineConfig(device="cpu"))


def test_the_default_format_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = on_cpu_with(8 * GIB, "smollm2-135m", monkeypatch)
    assert (fit.fits, fit.format, fit.options, fit.context) == (True, "int8", (), 8192)
    assert fit.sentence() == "yes, with int8, up to 8,192 tokens of context, 44 requests of 2,048 tokens at once"
    assert fit.command("smollm2-135m") == "chairlift serve smollm2-135m"


def test_less_memory_gives_a_smaller_format_and_a_shorter_context(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = [on_cpu_with(free * GIB, "qwen3-4b", monkeypatch) for free in (400, 16, 5, 4.2, 3)]
    assert [fit.format for fit in fits if fit.fits] == ["int8", "int8", "int4", "int4"]
    assert fits[0].context == 262_144
    assert fits[1].command("qwen3-4b") == f"chairlift serve qwen3-4b --max-model-len {fits[1].context}"
    assert fits[2].options[:2] == ("--quantization", "int4")
    assert [fit.fits for fit in fits] == [True] * 4 + [False]
    contexts = [fit.context for fit in fits[:2]]
    assert contexts == sorted(contexts, reverse=True)
    assert all(fit.context % 1024 == 0 for fit in fits)


def test_what_does_not_fit_names_the_largest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = on_cpu_with(6 * GIB, "gpt-oss-20b", monkeypatch)
    assert not fit.fits
    assert fit.sentence().startswith("no: the smallest format here, int4, takes 12.67 GiB of weights")
    assert fit.nearest is not None
    fitting = [each.name for each in known_models() if on_cpu_with(6 * GIB, each.name, monkeypatch).fits]
    assert fit.nearest == fitting[-1]
    assert on_cpu_with(1 << 20, "smollm2-135m", monkeypatch).nearest is None


def test_what_fits_in_its_place_is_named_with_the_options_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = on_cpu_with(6 * GIB, "gpt-oss-20b", monkeypatch)
    assert fit.nearest is not None
    expected = on_cpu_with(6 * GIB, fit.nearest, monkeypatch).command(fit.nearest)
    assert "--quantization int4 --max-model-len " in expected
    assert fit.nearest_command == expected


def test_a_command_can_be_pasted() -> None:
    assert Fit(True, "CPU").command("my model.gguf") == "chairlift serve 'my model.gguf'"


def test_the_commands_of_all_models_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options that are suggested exist, with values that they take."""
    monkeypatch.setattr("chairlift.server.lifecycle.serve_forever", lambda config, on_ready: _served(config))
    for model in known_models():
        fit = on_cpu_with(24 * GIB, model.name, monkeypatch)
        if fit.fits:
            result = run(*fit.command(model.name).split()[1:])
            assert result.exit_code == 0, result.output


async def _served(config: Any) -> int:
    return 0


def test_the_first_line_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fit, "free_memory", lambda device: 1 << 20)
    monkeypatch.setattr(memory_plan, "free_memory", lambda device, mapped=0: 1 << 20)
    assert run("models", "--check", "qwen3-0.6b").stdout.startswith("fits this machine: no: the smallest format here")
    for module in (model_fit, memory_plan):
        monkeypatch.setattr(module, "free_memory", lambda device, mapped=0: 64 * GIB)
    lines = run("models", "--check", "qwen3-0.6b").stdout.splitlines()
    assert lines[0].startswith("fits this machine: yes, with ")
    assert lines[0].endswith(" tokens at once")
    assert lines[1].split()[:5] == ["run", "it", "chairlift", "serve", "qwen3-0.6b"]


def test_the_memory_of_another_machine_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (model_fit, memory_plan):
        monkeypatch.setattr(module, "free_memory", lambda device, mapped=0: 64 * GIB)
    lines = run("models", "--check", "qwen3-4b", "--memory", "5GiB").stdout.splitlines()
    assert lines[0].startswith("fits 5GiB: yes, with int4, ")
    assert "5.00 GiB are free on the CPU" in lines[2]
    assert lines[0] != run("models", "--check", "qwen3-4b").stdout.splitlines()[0]
    assert run("models", "--check", "gpt-oss-20b", "--memory", "6GB").stdout.startswith("fits 6GB: no: ")
    assert "--memory: only goes with --check MODEL" in run("models", "--memory", "8GB").stderr
    assert "--memory: must be a number of bytes" in run("models", "--check", "qwen3-4b", "--memory", "much").stderr


def test_formats_for_both_devices_have_both_sizes() -> None:
    formats = check_model("qwen3-4b").formats
    assert formats["int4"].device == "GPU"
    assert formats["int4"].cpu_weight_bytes is not None
    assert formats["int8"].cpu_weight_bytes is formats["fp8"].cpu_weight_bytes is None
    assert " on a GPU, 2.50 GiB on a CPU" in run("models", "--check", "qwen3-4b").stdout


def test_a_format_that_is_asked_for_is_the_only_one_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(format: str, free: float) -> Fit:
        monkeypatch.setattr(model_fit, "free_memory", lambda device, mapped=0: int(free * GIB))
        return fit_model("qwen3-4b", check_model("qwen3-4b"), EngineConfig(device="cpu", quantization=format))

    assert fit("int4", 400).options == ("--quantization", "int4")
    assert fit("int8", 3).sentence().startswith("no: int8 takes 4.48 GiB of weights")
    assert fit("fp8", 400).sentence().startswith("no: fp8 is not possible: 8-bit floats are for GPUs")
    assert fit("auto", 400) == on_cpu_with(400 * GIB, "qwen3-4b", monkeypatch)


def test_the_format_goes_with_a_check_only() -> None:
    result = run("models", "--quantization", "int4")
    assert (result.exit_code, "--quantization: only goes with --check MODEL" in result.stderr) == (2, True)
    result = run("models", "--check", "qwen3-4b", "--quantization", "int9")
    assert (result.exit_code, "--quantization: unknown 'int9'; choose from auto" in result.stderr) == (2, True)
