"""Readers of weights in integers: GPTQ, AWQ, compressed-tensors (which also has 8-bit floats) and bitsandbytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from chairlift.errors import CorruptCheckpoint
from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, WeightParts, by_suffix
from chairlift.loading.quantized.floats import floats_of

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import GroupedIntegers, StoredWeight


@READERS.register("gptq")
class GPTQReader(QuantizedReader):
    """Integers of 2, 4 or 8 bits with a scale and a zero point for each group of input features.

    With act-order (`desc_act`) the columns of a group are not neighbours. Such a weight is dequantized when it is
    loaded: the 4-bit kernels need groups of neighbours; sorting the columns would mean to gather the activations of
    every product.
    """

    name = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._bits = self.integer("bits")
        layout = config.get("checkpoint_format", "gptq")
        if self._bits not in (2, 4, 8):
            raise self.refuse(f"weights of {self._bits} bits are not supported, only of 2, 4 and 8")
        if layout not in ("gptq", "gptq_v2"):
            raise self.refuse(f"its layout {layout!r} is not supported, only 'gptq' and 'gptq_v2'")
        overrides = [rule for rule in config.get("dynamic") or {} if not str(rule).startswith("-:")]
        if overrides:
            raise self.refuse(f"settings of single modules (dynamic: {overrides[0]!r:.60}) are not supported")
        self._zero_shift = 1 if layout == "gptq" else 0  # the first layout stores zero points less one

    def description(self) -> str:
        order = ", act-order" if self.config.get("desc_act") else ""
        return f"GPTQ, {self._bits}-bit integers in groups of {self.config.get('group_size')}{order}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return by_suffix(names, ("qweight", "qzeros", "scales"), ("g_idx",))

    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        import torch

        from chairlift.loading.stored_weight import GroupedIntegers, unpack_bits

        numbers = unpack_bits(parts["qweight"].t().contiguous(), self._bits)  # [out, in]
        scales = parts["scales"].t().contiguous()  # [out, groups]
        zeros = unpack_bits(parts["qzeros"], self._bits).t()[: len(scales)]
        levels = zeros.float() + self._zero_shift
        symmetric = levels.shape == scales.shape and bool((levels == 2 ** (self._bits - 1)).all())
        group_of = parts.get("g_idx")
        if group_of is not None:  # It is only needed where groups are not runs of neighbours.
            runs = torch.arange(len(group_of)) // (len(group_of) // scales.shape[1])
            group_of = None if torch.equal(runs, group_of.long()) else group_of
        return GroupedIntegers(self._bits, numbers, scales, None if symmetric else -(levels * scales.float()), group_of)


@READERS.register("awq")
class AWQReader(QuantizedReader):
    """4-bit integers with a scale and a zero point for each group of input features ("gemm" layout)."""

    name = "awq"
    order = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of its eight columns

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        bits = self.integer("bits" if "bits" in config else "w_bit", 4)
        version = str(config.get("version", "gemm")).lower()
        if bits != 4:
            raise self.refuse(f"weights of {bits} bits are not supported, only of 4")
        if version != "gemm":
            raise self.refuse(f"its layout {version!r} is not supported, only 'gemm'")

    def description(self) -> str:
        return f"AWQ, 4-bit integers in groups of {self.config.get('group_size', self.config.get('q_group_size'))}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return by_suffix(names, ("qweight", "scales"), ("qzeros",))

    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        from chairlift.loading.stored_weight import GroupedIntegers

        numbers, scales = self._in_order(parts["qweight"]), parts["scales"]  # [in, out], [groups, out]
        scales = scales.t().contiguous()
        offsets = -(self._in_order(parts["qzeros"]).t().float() * scales.float()) if "qzeros" in parts else None
        return GroupedIntegers(4, numbers.t().contiguous(), scales, offsets)

    def _in_order(self, words: Tensor) -> Tensor:
        """int32 [rows, n] -> uint8 [rows, 8 n]."""
        from chairlift.loading.stored_weight import unpack_bits

        numbers: Tensor = unpack_bits(words, 4).unflatten(1, (-1, 8))
        return numbers[..., self.order].flatten(1)


@READERS.register("auto-round")
class AutoRoundReader(QuantizedReader):
    """Integers that Intel's AutoRound has chosen, in the layouts of GPTQ or AWQ."""

    name = "auto-round"
    layouts: ClassVar[dict[str, type[QuantizedReader]]] = {
        "auto_round:auto_gptq": GPTQReader,
        "auto_round:auto_awq": AWQReader,
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        layout, type = str(config.get("packing_format")), config.get("data_type", "int")
        if layout not in self.layouts or type != "int":
            supported = ", ".join(self.layouts)
            raise self.refuse(f"its layout {layout!r:.60} of {type!r:.60} is not supported; supported are {supported}")
        layers = config.get("extra_config")
        for layer, own in layers.items() if isinstance(layers, Mapping) else ():
            if isinstance(own, Mapping) and own.get("bits", 16) not in (16, config.get("bits")):
                raise self.refuse(f"settings of single layers ({layer!r:.60}) are not supported")
        self._reader = self.layouts[layout](config)

    def description(self) -> str:
        return f"AutoRound in the layout of {self._reader.description()}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return self._reader.weights(names)

    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        return self._reader.read(weight, parts)


@READERS.register("compressed-tensors")
class CompressedTensorsReader(QuantizedReader):
    """Floats and integers of 8 and 4 bits, as llm-compressor writes them.

    Activations are not quantized with the checkpoint's scales: the weight formats round each row of activations with a
    scale of its own, or not at all, which is at least as exact.
    """

    name = "compressed-tensors"
    formats = (
        "pack-quantized",
        "float-quantized",
        "int-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise self.refuse("its quantization_config has no config_groups")
        self._weights = []
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                raise self.refuse("a group of its config_groups quantizes no weights")
            own = group.get("format")
            self._check(config.get("format") if own is None else own, weights)
            self._weights.append(weights)
        sparsity = config.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise self.refuse(f"sparse weights ({sparsity['format']}) are not supported")
        if config.get("transform_config"):
            raise self.refuse("weights transformed by rotations (transform_config) are not supported")

    def _check(self, format: Any, weights: Mapping[str, Any]) -> None:
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        if format not in self.formats:
            raise self.refuse(f"its format {format!r} is not supported; supported are {', '.join(self.formats)}")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8), ("float", 4)):
            raise self.refuse(f"weights of type {kind} with {bits} bits are not supported")

    def description(self) -> str:
        kinds = {f"{each.get('num_bits', 8)}-bit {each.get('type', 'int')}" for each in self._weights}
        return f"compressed-tensors, {' and '.join(sorted(kinds))}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        names = list(names)
        further = (
            *("weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale"),
            *("input_scale", "input_zero_point", "input_global_scale"),
        )
        packed = by_suffix(names, ("weight_packed", "weight_scale"), further)
        return packed | by_suffix(names, ("weight", "weight_scale"), further)

    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        from chairlift.loading.stored_weight import ScaledFloats

        if "weight_packed" in parts:
            is_float = parts["weight_packed"].element_size() == 1  # Integers are packed into words.
            return self._small_floats(weight, parts) if is_float else self._integers(weight, parts)
        if parts["weight_scale"].element_size() == 1:
            return floats_of(parts["weight"], parts["weight_scale"])
        numbers, scales = parts["weight"], parts["weight_scale"].float()
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
        if "weight_zero_point" in parts and bool(parts["weight_zero_point"].to(dtype=scales.dtype).any()):
            raise self.refuse(f"{weight} has zero points, which are supported in packed weights only")
        return ScaledFloats(numbers, scales, self._block(weight, scales, *numbers.shape))

    def _small_floats(self, weight: str, parts: WeightParts) -> StoredWeight:
        """NVFP4, whose scales are to be divided by a global one, and MXFP4."""
        if "weight_zero_point" in parts:
            raise self.refuse(f"{weight} has zero points, which are not supported in 4-bit floats")
        whole = parts.get("weight_global_scale")
        scales = parts["weight_scale"] if whole is None else parts["weight_scale"].float() / whole.float()
        return floats_of(parts["weight_packed"], scales)

    def _block(self, weight: str, scales: Tensor, rows: int, columns: int) -> tuple[int, int]:
        """The rows and columns that have a scale."""
        for block in (each.get("block_structure") for each in self._weights):
            if block and (-(-rows // block[0]), -(-columns // block[1])) == tuple(scales.shape):
                return block[0], block[1]
        if scales.numel() == 1:
            return rows, columns
        if len(scales) == rows and columns % scales.shape[1] == 0:  # a scale per channel or per group
            return 1, columns // scales.shape[1]
        raise CorruptCheckpoint(f"{weight}: scales of the shape {list(scales.shape)} do not fit [{rows}, {columns}]")

    def _integers(self, weight: str, parts: WeightParts) -> GroupedIntegers:
        from chairlift.loading.stored_weight import GroupedIntegers, unpack_bits

        packed, scales = parts["weight_packed"], parts["weight_scale"]
        columns = int(parts["weight_shape"][1]) if "weight_shape" in parts else None
        bits = next((each for each in (4, 8) if columns and -(-columns * each // 32) == packed.shape[1]), None)
        if bits is None or columns is None:
            raise CorruptCheckpoint(f"{weight}: weight_packed {list(packed.shape)} does not fit weight_shape")
        offsets = None
        if "weight_zero_point" in parts:
            zeros = unpack_bits(parts["weight_zero_point"].t().contiguous(), bits).t()[: len(packed)]
            offsets = -(zeros.float() * scales.float())
        numbers = unpack_bits(packed, bits)[:, :columns]
        return GroupedIntegers(bits, numbers, scales, offsets, parts.get("weight_g_idx"))


@READERS.register("bitsandbytes")
class BitsAndBytesReader(QuantizedReader):
    """4-bit floats (nf4, fp4), dequantized when they are loaded, and 8-bit integers."""

    name = "bitsandbytes"
    states = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._four = bool(config.get("load_in_4bit", config.get("_load_in_4bit")))
        if not self._four and not config.get("load_in_8bit", config.get("_load_in_8bit")):
            raise self.refuse("its quantization_config has neither load_in_4bit nor load_in_8bit")

    def description(self) -> str:
        return f"bitsandbytes, {self.config.get('bnb_4bit_quant_type', '4-bit') if self._four else '8-bit integers'}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        if not self._four:
            return by_suffix(names, ("weight", "SCB"), ("weight_format",))
        weights: dict[str, dict[str, str]] = {}
        for name in names:
            for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *self.states):
                if name.endswith(f".weight.{part}"):
                    weights.setdefault(name.removesuffix(f".{part}"), {})[part] = name
        for weight, parts in weights.items():
            parts["weight"] = weight
        return weights

    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        import torch

        from chairlift.loading.stored_weight import PlainValues, ScaledFloats

        if not self._four:
            scales = parts["SCB"].float().reshape(-1, 1) / 127
            return ScaledFloats(parts["weight"], scales, (1, parts["weight"].shape[1]))
        state = self._state(weight, parts)
        codes = parts["weight"].flatten()
        numbers = torch.stack((codes >> 4, codes & 15), dim=1).flatten().long()
        absmax = self._absmax(parts, state).repeat_interleave(int(state["blocksize"]))
        shape = torch.Size(state["shape"])
        if shape.numel() > min(len(numbers), len(absmax)):
            raise CorruptCheckpoint(f"{weight}: holds {len(numbers)} numbers for the shape {list(shape)}")
        values = parts["quant_map"].float()[numbers[: shape.numel()]] * absmax[: shape.numel()]
        return PlainValues(values.reshape(shape))

    def _state(self, weight: str, parts: WeightParts) -> dict[str, Any]:
        packed = next((parts[name] for name in self.states if name in parts), None)
        try:
            assert packed is not None
            state: dict[str, Any] = json.loads(bytes(packed.tolist()))
            return {key: state[key] for key in ("blocksize", "shape")} | state
        except (AssertionError, ValueError, KeyError, TypeError):
            raise CorruptCheckpoint(f"{weight}: its quant_state is missing or damaged") from None

    def _absmax(self, parts: WeightParts, state: Mapping[str, Any]) -> Tensor:
        """The largest number of each block, which may be quantized itself."""
        absmax = parts["absmax"]
        if "nested_absmax" not in parts:
            return absmax.float()
        nested = parts["nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
        return parts["nested_quant_map"].float()[absmax.long()] * nested + float(state["nested_offset"])
