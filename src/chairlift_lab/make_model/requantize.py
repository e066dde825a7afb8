"""Writes a GGUF file again with its matrices rounded to another type of blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from chairlift.errors import InvalidParameter
from chairlift.kernels.cpu.blocks.kinds import KINDS
from chairlift.loading.gguf.file import GGUFFile, GGUFTensor
from chairlift_lab.make_model.block_encoders import encode
from chairlift_lab.make_model.gguf_file import SMALLER, add_field

OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def requantize(source: Path, kind: str, path: Path, note: Callable[[str], None]) -> None:
    """Write `source` to `path` with all matrices as `kind`, or a smaller block where their columns do not fit."""
    import gguf

    if source.suffix != ".gguf":
        raise InvalidParameter("model", f"{source} is not a GGUF file")
    file = GGUFFile(source)
    writer = gguf.GGUFWriter(path, file.metadata["general.architecture"])
    for name, value in file.metadata.items():
        if not name.startswith(OWN_FIELDS):
            add_field(writer, name, value.tolist() if isinstance(value, np.ndarray) else value)
    for tensor in file.tensors.values():
        note(f"{kind}: {tensor.name}")
        values = file.read(tensor)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            own = _fitting(kind, tensor)
            writer.add_tensor(tensor.name, encode(own, values), raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _fitting(kind: str, tensor: GGUFTensor) -> str:
    return kind if tensor.shape[-1] % KINDS[kind].columns == 0 else SMALLER[kind]


def parse_kinds(text: str) -> list[str]:
    """ "all", or the names of types of blocks separated by commas."""
    names = list(KINDS) if text == "all" else [name.strip().upper() for name in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise InvalidParameter("block_types", f"there is no {name!r}; choose all, or from {', '.join(KINDS)}")
    return names
