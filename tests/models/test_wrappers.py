"""The text parts of models that also read images or sound, against the whole models of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from chairlift import LLM, SamplingParams
from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.tokenizer import load_tokenizer
from chairlift.models import describe, is_native
from chairlift.models.wrappers import canonical_name, kind, text_config
from tests.models.checkpoints import SIZES, VOCAB, assert_matches, load, make_reference, save, stream
from tests.models.tiny_configs import tiny_config
from tests.tiny import byte_level_tokenizer

transformers = pytest.importorskip("transformers")

HEAD_DIM = 12
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "embed_dim": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 60,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1}  # of 12 dimensions
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
PARTIAL = MROPE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Whole model -> changes of its tiny text part.
WRAPPERS: dict[str, dict[str, Any]] = {
    "mistral3": {"model_type": "mistral"},
    "llava": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
    "aria": {"model_type": "aria_text"},  # by the fallback
    "qwen2_vl": HEADS | {"rope_parameters": MROPE},
    "qwen2_5_vl": HEADS | {"rope_parameters": MROPE},
    "qwen3_vl": HEADS | {"head_dim": HEAD_DIM, "rope_parameters": MROPE | {"mrope_interleaved": True}},
    "qwen3_vl_moe": HEADS | EXPERTS | {"head_dim": HEAD_DIM, "num_experts": 4, "rope_parameters": MROPE},
    "glm4v": HEADS | {"rope_parameters": PARTIAL},
    "glm_ocr": HEADS | {"head_dim": HEAD_DIM, "rope_parameters": MROPE},
    "glm4v_moe": HEADS | EXPERTS | {"n_routed_experts": 4, "rope_parameters": PARTIAL},
    "kimi_k25": {"model_type": "deepseek_v3"},
}


def make_whole(model_type: str, changes: dict[str, Any]) -> Any:
    """A tiny random model of transformers with its parts for images."""
    make = transformers.CONFIG_MAPPING[model_type]
    base = make()
    if "model_type" in changes:
        text = tiny_config(changes["model_type"]).to_dict()
    else:
        text = base.get_text_config().to_dict() | SIZES | changes
        text |= {"layer_types": None} if "layer_types" in text else {}
    known = base.vision_config.to_dict()
    vision = {name: value for name, value in VISION.items() if name in known} | {"model_type": known["model_type"]}
    vision |= {"out_hidden_size": text["hidden_size"]} if "out_hidden_size" in known else {}
    torch.manual_seed(0)
    config = make(text_config=text, vision_config=vision)
    for each in (config, config.get_text_config()):
        each._experts_implementation = "eager"
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[make](config).eval()
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.05 if name.endswith("bias") else 0.3))
            else:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
        if whole.get_output_embeddings().weight is whole.get_input_embeddings().weight:
            whole.get_input_embeddings().weight.mul_(0.25)
    return whole


def write(whole: Any, model_type: str, folder: Path) -> dict[str, Any]:
    """Save the model with the names of its published checkpoints."""
    config = save(whole, folder)
    if model_type == "kimi_k25":  # transformers confuses its blocks for images with those of the text
        names = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
        names |= {"model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "mm_projector."}
        tensors = {}
        for name, tensor in whole.state_dict().items():
            prefix = next((each for each in names if name.startswith(each)), "model.")
            tensors[names.get(prefix, "") + name.removeprefix(prefix)] = tensor.clone()
        if config["tie_word_embeddings"]:
            del tensors["language_model.lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
    return config


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_logits_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    whole = make_whole(model_type, WRAPPERS[model_type])
    config = write(whole, model_type, tmp_path)
    inside = {name for name, _ in stream(tmp_path)}
    assert any("visual" in name or "vision" in name for name in inside)
    assert_matches(load(tmp_path), whole, 23, 3)
    assert kind(config) == "vision-language model"
    assert is_native(config) == (model_type != "aria")


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("model_type", ["internvl", "llava"])
def test_tokens_are_those_of_transformers_whatever_is_said_about_the_head(
    model_type: str, said: bool | None, tmp_path: Path
) -> None:
    """Whether the head is tied follows from the tensors: the two places of a config may contradict each other."""
    whole = make_whole(model_type, WRAPPERS[model_type])
    config = write(whole, model_type, tmp_path)
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
        part |= {} if said is None else {"tie_word_embeddings": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    prompt = [5, 17, 40, 101, 90]
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", kv_memory="4MiB", progress=False)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = llm.generate(prompt, params)[0].outputs[0].token_ids
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(whole(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert list(found) == tokens[len(prompt) :]


LAYOUTS = {
    "gemma3n_text": ("gemma3n", "text_config", "model.language_model.", "lm_head.", "model.audio_tower.x"),
    "qwen3": ("internvl_chat", "llm_config", "language_model.model.", "language_model.lm_head.", "mlp1.0.weight"),
    "deepseek_v2": ("deepseek_vl_v2", "language_config", "language.model.", "language.lm_head.", "projector.layers.0"),
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layouts_of_published_checkpoints(model_type: str, tmp_path: Path) -> None:
    """Whole models that the installed transformers cannot make, from their text parts."""
    whole_type, section, prefix, head, other = LAYOUTS[model_type]
    reference = make_reference(tiny_config(model_type))
    config = save(reference, tmp_path)
    tensors: dict[str, Tensor] = {other: torch.ones(2), "vision_model.encoder.layers.0.weight": torch.ones(3)}
    for name, tensor in stream(tmp_path):
        tensors[head + "weight" if name == "lm_head.weight" else prefix + name.removeprefix("model.")] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    whole = {"model_type": whole_type, section: config, "vision_config": {"hidden_size": 8}}
    assert_matches(load(tmp_path, whole), reference, 23, 3)


def test_speaking_models_read_text_with_their_thinker(tmp_path: Path) -> None:
    reference = make_reference(tiny_config("qwen3_moe"))
    text = save(reference, tmp_path) | {"model_type": "qwen3_omni_moe_text"}
    tensors = {f"thinker.{name}": tensor for name, tensor in stream(tmp_path)}
    tensors |= {
        "talker.model.layers.0.x": torch.ones(2),
        "thinker.visual.x": torch.ones(2),
        "code2wav.x": torch.ones(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text, "audio_config": {"d": 1}}
    config = {"model_type": "qwen3_omni_moe", "thinker_config": thinker | {"vision_config": {"d": 1}}}
    assert kind(config) == "vision- and audio-language model"
    assert_matches(load(tmp_path, config), reference, 23, 3)


def test_sizes_that_a_text_part_leaves_out() -> None:
    """LLaVA 1.5 and Pixtral say only what differs from the defaults of transformers."""
    llava = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064}
    info = describe({"model_type": "llava", "text_config": llava, "vision_config": {"hidden_size": 1024}})
    assert info.num_parameters / 1e9 == pytest.approx(6.74, rel=0.01)
    pixtral = {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "intermediate_size": 14336}
    pixtral |= {"num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 131072, "sliding_window": None}
    info = describe({"model_type": "llava", "text_config": pixtral, "vision_config": {"model_type": "pixtral"}})
    assert info.num_parameters / 1e9 == pytest.approx(12.25, rel=0.01)


def test_older_configs_have_the_text_part_beside_the_images() -> None:
    fields = tiny_config("qwen2").to_dict() | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    whole = fields | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}
    assert text_config(whole)["model_type"] == "qwen2_5_vl_text"
    assert describe(whole).num_parameters == describe(fields).num_parameters


def test_the_type_of_a_text_part_follows_from_its_class() -> None:
    """DeepSeek-OCR names the class of its text part and no type."""
    text = {name: value for name, value in tiny_config("qwen3").to_dict().items() if name != "model_type"}
    whole = {"model_type": "unheard_of", "vision_config": {"depth": 2}}
    named = whole | {"language_config": text | {"architectures": ["Qwen3ForCausalLM"]}}
    assert text_config(named)["model_type"] == "qwen3"
    assert describe(named).num_parameters == describe(text | {"model_type": "qwen3"}).num_parameters
    with pytest.raises(UnsupportedModel, match="names no model_type"):
        describe(whole | {"language_config": text | {"architectures": ["NoSuchClass"]}})


def test_a_text_part_that_is_no_object_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="text_config must be an object"):
        describe({"model_type": "llava", "text_config": "llama"})


def test_an_unknown_tensor_of_the_language_model_is_refused(tmp_path: Path) -> None:
    whole = {"model_type": "llava", "text_config": save(make_reference(tiny_config("llama")), tmp_path)}
    tensors = {f"language_model.{name}": tensor for name, tensor in stream(tmp_path)}
    save_file(tensors | {"language_model.model.positions.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"unexpected tensor language_model\.model\.positions"):
        load(tmp_path, whole)


def test_a_chat_template_in_a_file_of_the_processor(tmp_path: Path) -> None:
    save(make_reference(tiny_config("llama")), tmp_path)
    byte_level_tokenizer(VOCAB).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(open_checkpoint(tmp_path)).chat_template == "{{ messages }}"


def test_canonical_names() -> None:
    for prefix in ("model.text_model.", "language_model.backbone.", "language.model.", "thinker.model."):
        assert canonical_name(prefix + "layers.0.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
