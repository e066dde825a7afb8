"""Reads LoRA adapters: folders of PEFT and GGUF files of llama.cpp, of which all is checked before numbers are read."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import safe_open

from chairlift.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from chairlift.loading.config_file import read_json_object
from chairlift.loading.gguf.config import families
from chairlift.loading.gguf.file import GGUFFile, GGUFTensor

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
MAX_RANK = 512
MAX_ADAPTER_BYTES = 16 << 30
MAX_PATTERNS, MAX_PATTERN = 4096, 256  # Limits of a table of ranks or alphas, and of the characters of each.
_SIDES = {"lora_A.weight": "a", "lora_B.weight": "b"}
_GGUF_SIDES = {"lora_a": "a", "lora_b": "b"}
_FLOATS = ("F32", "F16", "BF16", "F64")

# What a config may switch on that makes more of a module than its weight plus a low-rank product.
REFUSED = {
    "use_dora": "DoRA divides each row by its norm, which changes with the sum of weight and adapter",
    "use_qalora": "QA-LoRA pools its inputs in groups",
    "use_bdlora": "its products are block-diagonal",
    "lora_bias": "its products have biases",
    "modules_to_save": "it replaces whole modules, which all requests of the base model share",
    "trainable_token_indices": "it replaces rows of the embedding table",
    "layer_replication": "it repeats layers of the base model",
    "alora_invocation_tokens": "an activated adapter begins in the middle of a prompt",
    "arrow_config": "Arrow routes between adapters",
    "target_parameters": "adapters of stacked experts are not supported",
    "velora_config": "VeLoRA projects its inputs",
    "monteclora_config": "MonteCLoRA samples its weights",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "eva_base")  # initialisations that change the base weights


class LowRank(NamedTuple):
    """The low-rank product that is added to a linear map: x Aᵀ Bᵀ times a scale."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class LowRankShape:
    """What a low-rank product is, known from the head of its file."""

    rank: int
    in_features: int
    out_features: int
    scale: float

    @property
    def num_bytes(self) -> int:
        """Its bytes in float32."""
        return 4 * self.rank * (self.in_features + self.out_features)


class AdapterFile:
    """An adapter whose config and shapes are read and checked; its numbers are still on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, LowRankShape] = {}

    @property
    def num_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.shapes.values())

    @property
    def max_rank(self) -> int:
        return max(shape.rank for shape in self.shapes.values())

    @cached_property
    def version(self) -> str:
        """What tells this content from another under the same name: a digest of the files."""
        digest = hashlib.sha256()
        for file in self.files():
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        return digest.hexdigest()[:16]

    def files(self) -> list[Path]:
        return [self.path]

    def products(self, heads: Mapping[str, int] | None = None) -> Iterator[tuple[str, LowRank]]:
        """The products by the name of their module; `heads`: how many heads queries and keys have in each module."""
        raise NotImplementedError

    def _check(self, sides: Mapping[str, Mapping[str, tuple[int, ...]]], scale: Any) -> None:
        """Take the shapes of both matrices of each module; `scale(module, rank)`."""
        if not sides:
            raise CorruptCheckpoint(f"{self.path}: holds no matrix of an adapter (lora_A, lora_B)")
        for module, shapes in sides.items():
            if shapes.keys() != {"a", "b"}:
                raise CorruptCheckpoint(f"{self.path}: {module} has only one of its two matrices")
            a, b = shapes["a"], shapes["b"]
            if len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in (*a, *b):
                raise CorruptCheckpoint(f"{self.path}: the matrices of {module} are {list(a)} and {list(b)}")
            if a[0] > MAX_RANK:
                raise UnsupportedModel(f"{self.path}: {module} has the rank {a[0]}; at most {MAX_RANK} is supported")
            self.shapes[module] = LowRankShape(a[0], a[1], b[0], scale(module, a[0]))
        if self.num_bytes > MAX_ADAPTER_BYTES:
            raise UnsupportedModel(f"{self.path}: has {self.num_bytes} bytes in float32, more than {MAX_ADAPTER_BYTES}")


def open_adapter(path: str | Path) -> AdapterFile:
    """Open the folder or GGUF file of an adapter; raises for what it is not or cannot do."""
    try:
        path = Path(path).expanduser()
        if path.is_dir():
            return PEFTAdapter(path)
        if path.is_file() and path.suffix == ".gguf":
            return GGUFAdapter(path)
    except (OSError, RuntimeError, ValueError) as error:  # A name that is too long, or of an unknown user.
        raise ModelNotFound(f"adapter {str(path)[:200]!r} cannot be opened: {error}") from None
    problem = f"give a folder with {CONFIG} and {WEIGHTS}, or a .gguf file"
    raise ModelNotFound(f"no adapter {str(path)[:200]!r}: {problem}")


class PEFTAdapter(AdapterFile):
    """A folder as PEFT writes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not (path / CONFIG).is_file():
            raise ModelNotFound(f"{path}: there is no {CONFIG}")
        if not (path / WEIGHTS).is_file():
            problem = "adapter_model.bin is a pickle, which is not read; save it as safetensors"
            pickled = (path / "adapter_model.bin").exists()
            raise ModelNotFound(f"{path}: there is no {WEIGHTS}{f' ({problem})' if pickled else ''}")
        self.config = read_json_object(path / CONFIG)
        _refuse_features(path, self.config)
        self._names: dict[str, dict[str, str]] = {}
        sides: dict[str, dict[str, tuple[int, ...]]] = {}
        with self._opened("np") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                module, side = self._parse(name)
                stored = opened.get_slice(name)
                if stored.get_dtype() not in _FLOATS:
                    raise UnsupportedModel(f"{path}: {name!r:.200} holds {stored.get_dtype()}, not floats")
                sides.setdefault(module, {})[side] = tuple(stored.get_shape())
                self._names.setdefault(module, {})[side] = name
        self._check(sides, _Scales(path, self.config))

    def files(self) -> list[Path]:
        return [self.path / CONFIG, self.path / WEIGHTS]

    def _parse(self, name: str) -> tuple[str, str]:
        module = name.removeprefix(PEFT_PREFIX)
        for suffix, side in _SIDES.items():
            if module.endswith(f".{suffix}"):
                return module.removesuffix(f".{suffix}"), side
        if "lora_embedding" in name:
            raise UnsupportedModel(f"{self.path}: {name!r:.200} adapts an embedding table, which is not supported")
        if "lora_magnitude" in name:
            raise UnsupportedModel(f"{self.path}: use_dora: {REFUSED['use_dora']}")
        problem = "is neither lora_A.weight nor lora_B.weight of a module"
        raise UnsupportedModel(f"{self.path}: {name!r:.200} {problem}")

    @contextmanager
    def _opened(self, framework: str = "pt") -> Iterator[Any]:
        file = self.path / WEIGHTS
        try:
            with safe_open(file, framework=framework) as opened:
                yield opened
        except (CorruptCheckpoint, UnsupportedModel):
            raise
        except Exception as error:  # safetensors has many exception types
            problem = f"cannot be read as safetensors ({error}). It is damaged or incomplete: fetch it again."
            raise CorruptCheckpoint(f"{file}: {problem}") from error

    def products(self, heads: Mapping[str, int] | None = None) -> Iterator[tuple[str, LowRank]]:
        with self._opened() as opened:
            for module, names in self._names.items():
                a, b = (opened.get_tensor(names[side]) for side in ("a", "b"))
                yield module, LowRank(a, b, self.shapes[module].scale)


def _refuse_features(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{path / CONFIG}: peft_type is {config.get('peft_type')!r:.60}; only LORA is supported")
    for name, reason in REFUSED.items():
        if config.get(name):
            value = config[name]
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            raise UnsupportedModel(f"{path / CONFIG}: {name} ({shown!s:.100}): {reason}")
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(f"{path / CONFIG}: bias ({config['bias']!r:.60}): it replaces biases of the base model")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        problem = "changes the base model; save it with path_initial_model_for_weight_conversion"
        raise UnsupportedModel(f"{path / CONFIG}: init_lora_weights ({start:.60}): {problem}")


class _Scales:
    """The factor of each module's product: alpha over its rank, or over the rank's root."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path = path
        self._stabilised = _boolean(path, config, "use_rslora")
        self._rank = _number(path, "r", config.get("r"))
        self._alpha = _number(path, "lora_alpha", config.get("lora_alpha"))
        self._ranks = _patterns(path, "rank_pattern", config)
        self._alphas = _patterns(path, "alpha_pattern", config)

    def __call__(self, module: str, rank: int) -> float:
        declared = _matching(self._ranks, module, self._rank)
        if declared != rank:
            problem = f"{module} has the rank {rank}, but {CONFIG} declares {declared:g} (r, rank_pattern)"
            raise CorruptCheckpoint(f"{self._path}: {problem}")
        alpha = _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._stabilised else rank)


def _boolean(path: Path, config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name) or False
    if not isinstance(value, bool):
        raise CorruptCheckpoint(f"{path / CONFIG}: {name} must be true or false, got {value!r:.60}")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CorruptCheckpoint(f"{path / CONFIG}: {name} must be a number, got {value!r:.60}")
    return float(value)


def _patterns(path: Path, name: str, config: Mapping[str, Any]) -> dict[re.Pattern[str], float]:
    """The numbers of modules whose names end as a pattern says. A pattern must not take long to try: groups are not
    repeated, and few parts are."""
    table = config.get(name) or {}
    if not isinstance(table, dict) or len(table) > MAX_PATTERNS:
        raise CorruptCheckpoint(f"{path / CONFIG}: {name} must be an object of at most {MAX_PATTERNS} patterns")
    compiled = {}
    for key, value in table.items():
        repeats = re.findall(r"(?<!\\)[*+{]", key)
        if len(key) > MAX_PATTERN or len(repeats) > 3 or re.search(r"\)[*+{]", key):
            raise UnsupportedModel(f"{path / CONFIG}: {name}: the pattern {key!r:.100} is too complex")
        try:
            pattern = re.compile(rf"(.*\.)?({key})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise CorruptCheckpoint(f"{path / CONFIG}: {name}: {key!r:.100} is no pattern ({error})") from None
        compiled[pattern] = _number(path, f"{name}[{key!r:.60}]", value)
    return compiled


def _matching(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)


class GGUFAdapter(AdapterFile):
    """A file as llama.cpp's converter writes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        kind, form = metadata.get("general.type"), metadata.get("adapter.type")
        if kind != "adapter" or form != "lora":
            raise UnsupportedModel(f"{path}: general.type is {kind!r:.40} and adapter.type {form!r:.40}, not a LoRA")
        if "adapter.alora.invocation_tokens" in metadata:
            raise UnsupportedModel(f"{path}: {REFUSED['alora_invocation_tokens']}")
        architecture = metadata.get("general.architecture")
        known = [each for each in families().values() if architecture in each.architectures]
        if not known:
            raise UnsupportedModel(f"{path}: the GGUF architecture {architecture!r:.60} is not supported")
        self._rotates_neighbours = known[0].rotates_neighbours
        names = {part: name for family in known for part, name in family.names.items() if "{}" not in name}
        alpha = _number(path, "adapter.lora.alpha", metadata.get("adapter.lora.alpha", 0.0))
        self._tensors: dict[str, dict[str, GGUFTensor]] = {}
        self._parts: dict[str, str] = {}
        for tensor in self._file.tensors.values():
            base, _, suffix = tensor.name.rpartition(".")
            words = base.split(".")
            part = words[2] if len(words) == 4 and words[0] == "blk" and words[3] == "weight" else ""
            if suffix not in _GGUF_SIDES or part not in names:
                raise UnsupportedModel(f"{path}: the tensor {tensor.name!r} of an adapter is not supported")
            module = f"layers.{words[1]}.{names[part]}"
            self._tensors.setdefault(module, {})[_GGUF_SIDES[suffix]] = tensor
            self._parts[module] = part
        sides = {name: {side: each.shape for side, each in both.items()} for name, both in self._tensors.items()}
        self._check(sides, lambda _, rank: alpha / rank if alpha else 1.0)

    def products(self, heads: Mapping[str, int] | None = None) -> Iterator[tuple[str, LowRank]]:
        import torch

        for module, both in self._tensors.items():
            a, b = (torch.from_numpy(self._file.read(both[side])) for side in ("a", "b"))
            if self._rotates_neighbours and self._parts[module] in ("attn_q", "attn_k"):
                count = (heads or {}).get(module)
                if not count or len(b) % (2 * count):
                    raise CorruptCheckpoint(f"{self.path}: {module} has {len(b)} rows for {count} heads")
                b = b.view(count, -1, 2, b.shape[1]).transpose(1, 2).reshape(b.shape)
            yield module, LowRank(a, b.contiguous(), self.shapes[module].scale)
