"""A model family: Llama with a norm of every query and key head, and another name for its activation."""

from chairlift.models.families import FAMILIES, Family

FAMILIES["normed_llama"] = Family(
    title="Normed Llama",
    defaults={"max_position_embeddings": 256, "act": "silu"},
    qk_norm="head",
    activation_key="act",
)
