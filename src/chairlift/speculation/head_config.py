"""The shape of a draft head, as its checkpoint's config.json has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from chairlift.errors import CorruptCheckpoint
from chairlift.models.config import DecoderConfig, LayerConfig
from chairlift.models.read_config import decoder_config

MODEL_TYPE = "chairlift_draft_head"
EPS = 1e-5
TRAINED_LENGTH = 4  # draft tokens that a head is trained for
MAX_LENGTH = 6  # in use: after four right draft tokens, the next is right as often as before


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
        given = {field.name: config[field.name] for field in fields(cls) if field.name in config}
        return cls(**given | {"taps": tuple(given.get("taps", ()))})

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
