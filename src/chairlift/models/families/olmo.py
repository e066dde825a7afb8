"""The OLMo models: norms behind the blocks, and one norm over all queries or keys."""

from __future__ import annotations

from chairlift.models.config import POST_NORMS
from chairlift.models.families.base import FAMILIES, Family, all_but_every_nth

_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

FAMILIES |= {
    "olmo2": Family(title="OLMo 2", defaults=_DEFAULTS, norms=POST_NORMS, qk_norm="full"),
    "olmo3": Family(
        title="OLMo 3",
        defaults=_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5},
        norms=POST_NORMS,
        qk_norm="full",
        windowed=all_but_every_nth,
        scales_local_rope=False,
    ),
}
