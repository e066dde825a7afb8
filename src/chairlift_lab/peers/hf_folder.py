"""`python -m chairlift_lab.peers.hf_folder MODEL.gguf FOLDER`: a GGUF model as the folder that other engines read.

Its weights become float32. Needs the package accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from chairlift.loading.resolve import resolve_model


def save_hf_folder(model: str, folder: Path) -> None:
    """Save the model, its config and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model(model)
    if path.suffix != ".gguf":
        raise SystemExit(f"{path} is not a GGUF file; a folder with a config.json needs no conversion")
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if any(weight.dtype != torch.float32 for weight in loaded.parameters()):
        raise SystemExit(f"transformers keeps the weights of {path} quantized, so they cannot be saved")
    loaded.hf_quantizer = None  # it would refuse to save dequantized weights
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chairlift_lab.peers.hf_folder", description=__doc__)
    parser.add_argument("model", help="a .gguf file, or a name from `chairlift models`")
    parser.add_argument("folder", type=Path, help="where to save it")
    given = parser.parse_args()
    save_hf_folder(given.model, given.folder)


if __name__ == "__main__":
    main()
