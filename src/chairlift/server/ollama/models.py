"""What Ollama's API tells of models: /api/tags, /api/show and /api/ps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from chairlift.server.served_model import ServedModel
from chairlift.text.fill_in_middle import can_fill_in_middle

# Of Ollama, whose API is meant. Clients ask for a version that they know to have what they need.
API_VERSION = "0.13.0"
NEVER = "2318-01-01T00:00:00Z"  # The model is not unloaded.

# The fields of a config.json by the ends of llama.cpp's keys.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_PARAMETERS = {
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "num_predict",
}  # Ollama's names of sampling parameters


def tagged(name: str) -> str:
    """Return a name with a tag, as all names of Ollama's models have one."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def entries(model: ServedModel) -> list[dict[str, Any]]:
    """Return what /api/tags and /api/ps have in common."""
    digest = hashlib.sha256(f"{model.name} {model.details.num_bytes} {model.fingerprint}".encode()).hexdigest()
    shared = {"size": model.details.num_bytes, "digest": digest, "details": _details(model)}
    return [{"name": tagged(name), "model": tagged(name), **shared} for name in model.all_names]


def tags(model: ServedModel) -> dict[str, Any]:
    return {"models": [one | {"modified_at": _time(model.created)} for one in entries(model)]}


def running(model: ServedModel, max_model_len: int) -> dict[str, Any]:
    more = {
        "expires_at": NEVER,
        "size_vram": model.details.num_bytes if model.details.on_gpu else 0,
        "context_length": max_model_len,
    }
    return {"models": [one | more for one in entries(model)[:1]]}


def description(model: ServedModel, name: str | None, max_model_len: int | None) -> dict[str, Any]:
    """Return the response of /api/show for one of the model's names."""
    defaults, details, family = model.defaults_of(name), model.details, model.details.family or "unknown"
    config = details.config.get("text_config") or details.config
    info: dict[str, Any] = {"general.architecture": family, "general.basename": model.name}
    if details.num_parameters is not None:
        info["general.parameter_count"] = details.num_parameters
    context = max_model_len or config.get("max_position_embeddings")
    info |= {} if context is None else {f"{family}.context_length": context}
    info |= {f"{family}.{key}": config[name] for key, name in _SIZES.items() if config.get(name) is not None}
    return {
        "license": "",
        "modelfile": f"# served by chairlift\nFROM {model.name}\n",
        "parameters": "\n".join(_parameters(defaults.sampling)),
        **({"system": defaults.system_prompt} if defaults.system_prompt else {}),
        "template": model.tokenizer.chat_template or "",
        "details": _details(model),
        "model_info": info,
        "capabilities": capabilities(model),
        "modified_at": _time(model.created),
    }


def _parameters(sampling: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Modelfile; a parameter with several values has as many."""
    for name, value in sampling.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            shown = f"{each:g}" if isinstance(each, float) else json.dumps(each)
            yield f"{_PARAMETERS.get(name, name)} {shown}"


def capabilities(model: ServedModel) -> list[str]:
    """Return what the model was made for, in Ollama's words."""
    tokenizer, found = model.tokenizer, []
    if model.embedding.generates:
        found.append("completion")
        found += ["tools"] if tokenizer.chat_template is not None and tokenizer.template_shows_tools else []
        found += ["thinking"] if model.reasoning_format is not None else []
        found += ["insert"] if can_fill_in_middle(tokenizer) else []
    else:
        found.append("embedding")
    return found


def _details(model: ServedModel) -> dict[str, Any]:
    details = model.details
    return {
        "parent_model": "",
        "format": details.format,
        "family": details.family,
        "families": [details.family],
        "parameter_size": _size(details.num_parameters),
        "quantization_level": (details.quantization or "").removeprefix("GGUF, ") or "none",
    }


def _size(count: int | None) -> str:
    if count is None:
        return ""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
