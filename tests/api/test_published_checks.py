"""What `models --check` says about published configs, which are beside this file without their lists of modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.engine.model_check import check_model
from chairlift.loading.resolve import read_model_config

pytest.importorskip("transformers")

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
SPARSE = "it chooses keys by sparse attention (index_topk"
NVFP4 = "ModelOpt NVFP4, 4-bit floats with an 8-bit scale per 16"
UNKNOWN = "transformers has no causal language model of that name"
BLOCKS = "fp8 with a scale per 128x128"
READS_IMAGES = "vision-language model"
VISION = f"{READS_IMAGES}: its text part runs; images are not read"
MULTIMODAL = "multimodal model: its text part runs; other inputs are not read"

# Name, type of the text part, billions of weights, quantization, what else it is; and why it is refused.
ANSWERS: list[tuple[str, str, float, str | None, str | None, tuple[str, ...]]] = [
    ("MiniMaxAI/MiniMax-M2.7", "minimax_m2", 228.7, BLOCKS, None, ()),
    ("Qwen/Qwen3-0.6B", "qwen3", 0.596, None, None, ()),
    ("Qwen/Qwen3-235B-A22B", "qwen3_moe", 235.1, None, None, ()),
    ("Qwen/Qwen3-30B-A3B", "qwen3_moe", 30.5, None, None, ()),
    ("Qwen/Qwen3-32B", "qwen3", 32.8, None, None, ()),
    (
        "Qwen/Qwen3-32B-FP8-Static-PerTensor",
        "qwen3",
        32.8,
        "ModelOpt FP8, 8-bit floats with a scale per tensor",
        None,
        (),
    ),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3_moe", 480.2, None, None, ()),
    ("Qwen/Qwen3-VL-2B-Instruct", "qwen3_vl_text", 1.721, None, READS_IMAGES, ()),
    ("Qwen/Qwen3-VL-32B-Instruct", "qwen3_vl_text", 32.8, None, READS_IMAGES, ()),
    ("Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl_text", 4.022, None, READS_IMAGES, ()),
    ("Qwen/Qwen3.5-122B-A10B", "qwen3_5_moe_text", 122.1, None, VISION, ()),
    ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text", 34.7, None, VISION, ()),
    ("XiaomiMiMo/MiMo-7B-Base", "mimo", 7.623, None, None, ()),
    ("deepseek-ai/DeepSeek-R1", "deepseek_v3", 671.0, BLOCKS, None, ()),
    ("deepseek-ai/DeepSeek-V3.2", "deepseek_v32", 671.9, BLOCKS, None, ()),
    ("deepseek-ai/DeepSeek-V4-Pro", "deepseek_v4", 0.0, BLOCKS, None, (SPARSE,)),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "llama4_text", 400.7, None, MULTIMODAL, ()),
    ("meta-llama/Meta-Llama-3.1-405B", "llama", 405.9, None, None, ()),
    ("meta-llama/Meta-Llama-3.1-8B", "llama", 8.03, None, None, ()),
    ("mistralai/Mixtral-8x7B-v0.1", "mixtral", 46.7, None, None, ()),
    ("moonshotai/Kimi-K2.5", "kimi_k2", 1026.4, "compressed-tensors, 4-bit int", VISION, ()),
    ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek_v3", 671.0, None, None, ()),
    ("nvidia/DeepSeek-V4-Flash-NVFP4", "deepseek_v4", 0.0, "ModelOpt MIXED_PRECISION: NVFP4", None, (SPARSE,)),
    ("nvidia/GLM-5-NVFP4", "glm_moe_dsa", 743.9, None, None, ()),
    ("nvidia/GLM-5.2-NVFP4", "glm_moe_dsa", 743.4, NVFP4, None, ()),
    ("nvidia/Gemma-4-31B-IT-NVFP4", "gemma4_text", 30.7, NVFP4, VISION, ()),
    ("nvidia/Kimi-K2.6-NVFP4", "deepseek_v3", 1026.4, NVFP4, VISION, ()),
    ("nvidia/Llama-3.1-70B-Instruct-FP8", "llama", 70.6, None, None, ()),
    ("nvidia/MiniMax-M2.5-NVFP4", "minimax_m2", 228.7, NVFP4, None, ()),
    (
        "nvidia/MiniMax-M3-NVFP4",
        "minimax_m3_vl_text",
        0.0,
        "ModelOpt MIXED_PRECISION: MXFP8",
        None,
        ("vision-language model, whose text part cannot run", SPARSE),
    ),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "nemotron_h", 31.6, None, None, ()),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "nemotron_h", 120.7, None, None, ()),
    ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", "nemotron_h", 549.3, None, None, ()),
    ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", "nemotron_h", 31.6, None, None, ()),
    ("nvidia/Qwen3-235B-A22B-NVFP4", "qwen3_moe", 235.1, None, None, ()),
    ("nvidia/Qwen3.5-397B-A17B-NVFP4", "qwen3_5_moe_text", 396.3, NVFP4, VISION, ()),
    (
        "nvidia/Qwen3.6-35B-A3B-NVFP4",
        "qwen3_5_moe_text",
        34.7,
        "ModelOpt MIXED_PRECISION: FP8",
        VISION,
        (),
    ),
    ("openai/gpt-oss-20b", "gpt_oss", 20.9, "mxfp4, 4-bit floats with a scale per 32", None, ()),
    ("sgl-project/DeepSeek-V4-Pro-FP8", "deepseek_ref", 0.0, BLOCKS, None, (UNKNOWN,)),
    ("stepfun-ai/Step-3.7-Flash-FP8", "step3p7", 0.0, BLOCKS, None, (UNKNOWN,)),
    ("zai-org/GLM-5-FP8", "glm_moe_dsa", 743.9, BLOCKS, None, ()),
    ("zai-org/GLM-5.1-FP8", "glm_moe_dsa", 743.9, BLOCKS, None, ()),
    ("zai-org/GLM-5.2-FP8", "glm_moe_dsa", 743.9, BLOCKS, None, ()),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    for name, config in CONFIGS.items():
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize(("name", "model_type", "billions", "stored", "note", "reasons"), ANSWERS)
def test_answers(
    name: str,
    model_type: str,
    billions: float,
    stored: str | None,
    note: str | None,
    reasons: tuple[str, ...],
    folders: Path,
) -> None:
    found = check_model(str(folders / name / "config.json"))
    assert (found.model_type, found.path) == (model_type, "refused" if reasons else "native")
    assert found.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert (found.stored, found.note) == (stored, note)
    assert all(reason in str(found.reason) for reason in reasons)
    assert reasons or found.reason is None


def test_every_config_has_an_answer() -> None:
    assert [name for name, *_ in ANSWERS] == list(CONFIGS)
    assert {path for name, *_ in ANSWERS for path in [name.partition("/")[0]]} >= {"nvidia", "Qwen", "zai-org"}


def test_a_file_of_modelopt_says_what_the_config_does_not(folders: Path) -> None:
    """Many checkpoints of NVIDIA are quantized by what a second file says."""
    file = folders / "nvidia/DeepSeek-V3.1-NVFP4/hf_quant_config.json"
    file.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}')
    found = check_model(str(file.parent))
    file.unlink()
    assert (found.path, found.stored) == ("native", NVFP4)
    assert found.num_parameters > 600e9


WRONG: list[Any] = [None, "x", -1, 0, 1.5, [], {}, True, 10**30, [1, "a"], {"a": {}}]


def _spoiled(config: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """The config with each of its values left out, and replaced by one of those above."""
    keys = [(key,) for key in config] + [
        (key, own) for key in config if isinstance(config[key], dict) for own in config[key]
    ]
    spoiled = []
    for place, path in enumerate(keys):
        for change in ("left out", WRONG[(index + place) % len(WRONG)]):
            copy = json.loads(json.dumps(config))
            inner = copy[path[0]] if len(path) == 2 else copy
            del inner[path[-1]]
            spoiled.append(copy if change == "left out" else copy | _with(copy, path, change))
    return spoiled


def _with(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: value if len(path) == 1 else config[path[0]] | {path[1]: value}}


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-VL-2B-Instruct", "nvidia/Gemma-4-31B-IT-NVFP4", "deepseek-ai/DeepSeek-V3.2"]
)
def test_damaged_configs_are_answered_with_a_reason(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config in _spoiled(CONFIGS[name], list(CONFIGS).index(name)):
        file.write_text(json.dumps(config))
        found = check_model(str(file))
        assert found.path != "refused" or found.reason


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"model_type": []}', '{"model_type": {"a": 1}}', "\x00"])
def test_files_that_are_no_config_are_answered_with_a_reason(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    found = check_model(str(tmp_path))
    assert (found.path, found.model_type) == ("refused", "unknown" if text[:1] != "{" else found.model_type)
    assert found.reason
    read_model_config(str(tmp_path)) if text.startswith('{"') else None


# ---- other published configs, written down from memory with the answers ---------------------------------------------

RECALLED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("recalled_configs.json").read_text())


@pytest.mark.parametrize("name", RECALLED)
def test_answers_for_recalled_configs(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECALLED[name]["config"]))
    found = check_model(str(tmp_path))
    answer = RECALLED[name]["answer"]
    assert {key: getattr(found, key) for key in ("path", "model_type", *answer)} == answer
    assert [key for key in ("stored", "note", "reason") if getattr(found, key)] == [
        key for key in ("stored", "note", "reason") if key in answer
    ]


def _groups(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": group}, **more}


def _numbers(bits: int, type: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": type, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
TOKENS = _numbers(8, "float", "token", dynamic=True)
MLX = {"group_size": 64, "bits": 4}
# Settings as published -> what is said of them, and a part of the reason where they cannot be read.
QUANTIZED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"quantization_config": GPTQ}, "GPTQ, 4-bit integers in groups of 128, act-order", None),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes", None),
    (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}},
        "AWQ, 4-bit integers in groups of 128",
        None,
    ),
    (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}},
        "fp8 with a scale per tensor",
        None,
    ),
    (
        {"quantization_config": _groups(_numbers(8, "float", "tensor"), TOKENS, format="float-quantized")},
        "compressed-tensors, 8-bit float",
        None,
    ),
    (
        {"quantization_config": _groups(_numbers(4, "int", "group", group_size=128), format="pack-quantized")},
        "compressed-tensors, 4-bit int",
        None,
    ),
    (
        {"quantization_config": _groups(_numbers(4, "float", "tensor_group"), format="nvfp4-pack-quantized")},
        "compressed-tensors, 4-bit float",
        None,
    ),
    (
        {"quantization_config": _groups(_numbers(6, "float", "group"), format="mxfp6-pack-quantized")},
        "compressed-tensors",
        "mxfp6-pack-quantized",
    ),
    ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "fbgemm, 8-bit floats", None),
    ({"quantization_config": {"quant_method": "quark"}}, "quark", "names no type of weights"),
    ({"quantization_config": {"quant_method": "auto-round"}}, "auto-round", "layout 'None'"),
    *(
        ({"quantization_config": {"quant_method": method, "bits": 4}}, method, f"quantized by {method!r}")
        for method in ("exl2", "exl3", "aqlm", "torchao", "hqq", "vptq", "bitnet")
    ),
    # MLX names no method, and writes its settings under one key or two.
    ({"quantization": MLX}, "mlx", "quantized by 'mlx'"),
    ({"quantization": MLX, "quantization_config": MLX}, "mlx", "quantized by 'mlx'"),
    ({"quantization": MLX | {"model.layers.0.mlp": {"bits": 8}, "mode": "mxfp4"}}, "mlx", "quantized by 'mlx'"),
]


@pytest.mark.parametrize(("settings", "stored", "reason"), QUANTIZED)
def test_quantizations(settings: dict[str, Any], stored: str, reason: str | None, tmp_path: Path) -> None:
    config = CONFIGS["meta-llama/Meta-Llama-3.1-8B"] | settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = check_model(str(tmp_path))
    assert found.path == ("native" if reason is None else "refused")
    assert str(found.stored).startswith(stored)
    assert (reason or "") in str(found.reason)
    assert found.num_parameters == 8_030_261_248
