"""What a draft head looks like, and how its checkpoint says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from chairlift.errors import CorruptCheckpoint
from chairlift.models.config import DecoderConfig, LayerConfig
from chairlift.models.read_config import decoder_config

MODEL_TYPE = "chairlift_draft_head"
EPS = 1e-5
MOST_GUESSES = 4  # one after the other: what a head is trained for
MOST_ASKED = 6  # and what it is asked for: behind four that are right, it is right as often as before


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One decoder layer between the target's embedding and the target's head."""

    hidden_size: int  # the target's
    target_vocab_size: int
    draft_vocab_size: int  # how many of the target's tokens it can guess
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    max_position_embeddings: int
    taps: tuple[int, ...] = ()  # layers of the target whose input it reads beside what the last one puts out

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
        """The same as a Llama of one layer."""
        shape = asdict(self) | {"model_type": "llama", "vocab_size": self.target_vocab_size, "num_hidden_layers": 1}
        return decoder_config(shape | {"rms_norm_eps": EPS, "tie_word_embeddings": True})

    @property
    def feature_size(self) -> int:
        """Numbers that it reads of one of the target's tokens."""
        return self.hidden_size * (1 + len(self.taps))

    @property
    def layer(self) -> LayerConfig:
        return self.decoder().layers[0]


def is_head(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == MODEL_TYPE
