"""The layers of a draft head, which continues the target's own hidden states.

The target's layers hold far more about what comes next than a small model could find out by itself. So the head reads,
for each token, the token's embedding and the target's hidden states of the token before it (the output of the last
layer, and the input of some layers in the middle, joined to the size of one), and makes a state of its own, which the
target's own head turns into a draft token. From the second draft token on it reads its own states instead. Its keys and
values are one more layer of the target's KV storage.

    target      h0      h1      h2                       read once the target has computed them
    tokens      x1      x2      x3      d4      d5
    head        s1      s2      s3  ->  s4  ->  s5       each from its token and the state to its left
    drafts                      d4      d5      d6       x3 was sampled from h2, and is known
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.errors import CorruptCheckpoint, InvalidParameter
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.int8 import Int8Weight
from chairlift.layers.linear import Build, Linear
from chairlift.layers.norm import RMSNorm
from chairlift.layers.parts import Part
from chairlift.layers.rope import RotaryEmbedding
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig, LayerConfig
from chairlift.models.decoder import Decoder
from chairlift.models.decoder_layer import DecoderLayer, LayerStep
from chairlift.models.loader import fill
from chairlift.models.programs.base import fuse_layers
from chairlift.models.read_config import decoder_config

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.int8 import PackedWeight
    from chairlift.models.programs.fuse_cpu import FusedCPULayers, LayerTiles
    from chairlift.speculation.fused_head import FusedHead


class DraftHead:
    def __init__(self, config: HeadConfig, target: Decoder, tensors: Iterable[tuple[str, Tensor]], index: int) -> None:
        """`index`: which layer of the KV storage is the head's."""
        if (config.hidden_size, config.target_vocab_size) != (target.config.hidden_size, target.vocab_size):
            trained = f"hidden size {config.hidden_size} and {config.target_vocab_size} tokens"
            problem = f"was trained for another model, with {trained}; this one has {target.config.hidden_size}"
            raise InvalidParameter("speculate", f"{problem} and {target.vocab_size}")
        dtype, device, decoder = target.dtype, target.device, config.decoder()
        attention = replace(decoder.layers[0].only_attention, index=index)
        layer = replace(decoder.layers[0], attention=attention)
        if not all(0 <= tap < len(target.layers) for tap in config.taps):
            raise CorruptCheckpoint(f"the draft head reads layers {config.taps} of a model of {len(target.layers)}")
        self.target = target
        target.tap(config.taps)
        self._taps = config.taps
        self.hidden_size = config.hidden_size
        self.feature_size = config.feature_size
        self.attention_layers: tuple[AttentionLayer, ...] = (attention,)
        build = Build(dtype, device, target.head_format)
        self.mix = build.linear(2 * config.hidden_size, config.hidden_size)
        self.joint: Linear | None = None  # one of several hidden states of the target
        if config.taps:
            self.joint = build.linear(config.feature_size, config.hidden_size)
        self.layer = DecoderLayer(decoder, layer, build)
        assert layer.rope is not None
        self._rope = layer.rope
        self.rotary = RotaryEmbedding(layer.rope, dtype=dtype, device=device)
        self.norm = RMSNorm(config.hidden_size, EPS, build)
        self._run_layer = fuse_layers([self.layer], self.norm, device)
        self.token_ids = self._fill(tensors, config).to(device)  # [draft vocab]: row of the head -> token
        self.head = Linear(head_rows(target, self.token_ids), format=target.head_format)
        tiles = self._layer_tiles(decoder)
        for part in self._parts():
            part.finalize()
        self._fused: FusedCPULayers | None = None
        self.fused_head: FusedHead | None = None  # Set where all drafts of a step are one call.
        if tiles is not None:
            self._fuse(decoder, tiles)

    def _parts(self) -> Iterator[Part]:
        yield from (self.mix, *self.layer.parts(), self.norm, self.head)
        if self.joint is not None:
            yield self.joint

    def _fill(self, tensors: Iterable[tuple[str, Tensor]], config: HeadConfig) -> Tensor:
        weights = dict(tensors)
        token_ids = weights.pop("token_ids", torch.empty(0)).long()
        targets = {"norm.weight": self.norm.weight, **dict(self.mix.targets(["mix"]))}
        if self.joint is not None:
            targets |= dict(self.joint.targets(["joint"]))
        targets |= {f"layers.0.{name}": target for name, target in self.layer.targets()}
        fill(targets, weights.items(), text_part_only=False, tied=False)
        if token_ids.shape != (config.draft_vocab_size,):
            raise CorruptCheckpoint(f"the draft head should have {config.draft_vocab_size} token_ids")
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < config.target_vocab_size:
            raise CorruptCheckpoint("token_ids of the draft head are not in the model's vocabulary")
        return token_ids

    def _layer_tiles(self, decoder: DecoderConfig) -> LayerTiles | None:
        """Where the layer's weights are packed if all drafts of a step can be one call of the fused CPU kernel."""
        format = self.target.head_format
        if not (self.target.program.is_one_kernel and issubclass(format, Int8Weight)):
            return None
        from chairlift.models.programs.fuse_cpu import LayerTiles, can_fuse

        first, own = self.target.attention_layers[0], self.layer.attention.layer
        stored_alike = (own.num_kv_heads, own.head_dim) == (first.num_kv_heads, first.head_dim)
        return LayerTiles([self.layer], format) if stored_alike and can_fuse(decoder) else None

    def _fuse(self, decoder: DecoderConfig, tiles: LayerTiles) -> None:
        """A pass is so short that the calls around it count."""
        from chairlift.models.programs.fuse_cpu import FusedCPULayers
        from chairlift.speculation.fused_head import FusedHead

        self._fused = FusedCPULayers(decoder, [self.layer], self.norm, tiles)
        embedded = unit(self.target.embed(self.token_ids))
        linears = (self.mix, self.head) if self.joint is None else (self.mix, self.head, self.joint)
        mix, head, *joint = (cast("PackedWeight", linear.weight.tiles) for linear in linears)  # 8-bit ones
        own = self.layer.attention.layer
        self.fused_head = FusedHead(self._fused, own, self._rope, joint[0] if joint else None, mix, head, embedded)

    def num_weight_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts())

    def feature_parts(self, hidden: HiddenStates) -> list[Tensor]:
        """The target's states of T tokens that the head reads [T, hidden] each."""
        taps = [hidden.taps[self.target.taps.index(tap)] for tap in self._taps]
        return [*taps, hidden.last]

    def features(self, hidden: HiddenStates) -> Tensor:
        """The same as one tensor [T, features], copied, since the next step may overwrite them."""
        return torch.cat(self.feature_parts(hidden), dim=-1)

    def join(self, features: Tensor) -> Tensor:
        """[T, features] -> [T, hidden]."""
        if self.joint is None:
            return features
        return self.joint(unit(features.unflatten(-1, (-1, self.hidden_size))).flatten(-2))

    def states(self, tokens: Tensor, previous: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """tokens, positions [T], previous [T, hidden]: the states of the tokens before -> [T, hidden]."""
        x = self.mix(self._inputs(tokens, previous))
        work = None if self._fused is None else attention.work(self._fused.layer)
        if self._fused is not None and work is not None:
            return self._fused(x, positions, work)[0]
        return self._run_layer(x, self._step(positions, attention))

    def store_keys(self, tokens: Tensor, previous: Tensor, positions: Tensor, attention: StepAttention) -> None:
        """As `states`, for tokens behind which nothing is drafted: only their keys and values are needed."""
        x = self.mix(self._inputs(tokens, previous))
        norm = self.layer.before_attention
        self.layer.mix(x if norm is None else norm(x), self._step(positions, attention))

    def _step(self, positions: Tensor, attention: StepAttention) -> LayerStep:
        return LayerStep(attention, positions, {self._rope: self.rotary(positions)})

    def _inputs(self, tokens: Tensor, previous: Tensor) -> Tensor:
        embedding = self.target.embedding
        if on_gpu(tokens.device) and embedding.weight is None:
            from chairlift.kernels.triton.drafts import draft_inputs

            return draft_inputs(tokens, embedding.table, embedding.scale, previous.contiguous(), EPS)
        return torch.cat((unit(self.target.embed(tokens)), unit(previous)), dim=-1)

    def scores(self, states: Tensor) -> Tensor:
        """[S, hidden] -> [S, draft vocab], of the tokens that `token_ids` lists."""
        return self.head(states)


def head_rows(target: Decoder, token_ids: Tensor) -> Tensor:
    """The rows of the target's own head that score these tokens [tokens, hidden]."""
    if target.config.tied_head:
        return target.embed(token_ids) / target.embedding.scale
    # However the head is stored, it is a linear map: unit vectors yield its weights.
    numbers = torch.eye(target.config.hidden_size, dtype=target.dtype, device=target.device)
    return torch.cat([target.head(some)[:, token_ids] for some in numbers.split(64)]).T.contiguous()


def unit(x: Tensor) -> Tensor:
    """Scale to a mean square of one."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


MODEL_TYPE = "chairlift_draft_head"
EPS = 1e-5
TRAINED_LENGTH = 4  # draft tokens that a head is trained for
MAX_LENGTH = 6  # More in use: after four right draft tokens, the next is right as often as before.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One decoder layer between the target's embedding and the target's head."""

    hidden_size: int  # the target's
    target_vocab_size: int
    draft_vocab_size: int  # how many of the target's tokens it can draft
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    max_position_embeddings: int
    taps: tuple[int, ...] = ()  # layers of the target whose input it reads beside the output of the last one

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> HeadConfig:
        missing = sorted(field.name for field in fields(cls) if field.default is MISSING and field.name not in config)
        if missing:
            raise CorruptCheckpoint(f"config.json of the draft head lacks {', '.join(missing)}")
        values = {field.name: config[field.name] for field in fields(cls) if field.name in config}
        return cls(**values | {"taps": tuple(values.get("taps", ()))})

    def to_json(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, **asdict(self)}

    def decoder(self) -> DecoderConfig:
        """The same shape as a Llama of one layer."""
        shape = asdict(self) | {"model_type": "llama", "vocab_size": self.target_vocab_size, "num_hidden_layers": 1}
        return decoder_config(shape | {"rms_norm_eps": EPS, "tie_word_embeddings": True})

    @property
    def feature_size(self) -> int:
        """Numbers that it reads per token of the target."""
        return self.hidden_size * (1 + len(self.taps))

    @property
    def layer(self) -> LayerConfig:
        return self.decoder().layers[0]


def is_head(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == MODEL_TYPE
