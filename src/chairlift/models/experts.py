"""Mixtures of experts as a config describes them: the names, the routing, and which layers have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.layers.mlp import ClampedGate
from chairlift.layers.routing import Routing, Scores
from chairlift.models.fields import Fields


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the parts of a mixture-of-experts block in the checkpoint.

    The experts' weights come as `{experts}.{number}.{inner}.weight` and so on, or stacked into tensors of three
    dimensions: `stacked_gate_up` [experts, 2 * inner, hidden] and `stacked_down` [experts, hidden, inner]. The names of
    stacked biases end in `_bias`.
    """

    block: str = "mlp"
    inner: tuple[str, ...] = ("gate_proj", "up_proj")  # one name: experts, also the shared one, have no gates
    down: str = "down_proj"
    experts: str = "experts"
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    correction_bias_is_row: bool = False  # it is stored as a matrix of one row
    shared: str | None = None  # It names the shared expert; other families have none.
    shared_is_outside: bool = False  # it is beside the block instead of inside
    shared_inner: tuple[str, ...] = ("gate_proj", "up_proj")  # one name: both are one tensor, or there is no gate
    shared_down: str = "down_proj"
    shared_gate: str | None = None  # Its product's sigmoid multiplies the shared expert's output.
    stacked_gate_up: str = "experts.gate_up_proj"
    stacked_down: str = "experts.down_proj"
    transposed: bool = False  # the last two dimensions of stacked weights are exchanged, unless they are quantized
    interleaved: bool = False  # the rows of gate and up alternate in stacked weights
    latent: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")  # products around the experts, in few families


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of one layer."""

    routing: Routing
    names: ExpertNames
    shared_size: int = 0  # inner size of the shared expert; 0: there is none
    bias: bool = False  # the experts' products have biases
    clamped_gate: ClampedGate | None = None  # instead of the model's activation
    latent_size: int = 0  # The experts read a projection of this size; 0: they read the hidden states

    def num_parameters(self, hidden_size: int, intermediate_size: int) -> int:
        routing, products = self.routing, 1 + len(self.names.inner)
        per_expert = products * (self.latent_size or hidden_size) * intermediate_size
        per_expert += hidden_size + routing.router_bias + routing.correction_bias
        if self.bias:
            per_expert += 2 * intermediate_size + hidden_size
        shared = products * hidden_size * self.shared_size + 2 * hidden_size * self.latent_size
        gate = hidden_size if self.shared_size and self.names.shared_gate is not None else 0
        return routing.num_experts * per_expert + shared + gate


def has_experts(fields: Fields, index: int) -> bool:
    """Whether a layer has experts, by any of the names that configs have for it; without them every layer has."""
    if "mlp_layer_types" in fields:
        types = fields.items("mlp_layer_types", str, length=fields.integer("num_hidden_layers"))
        return bool(types[index] == "sparse")
    if index in fields.items("mlp_only_layers", int):
        return False
    step = fields.optional_integer("decoder_sparse_step") or 1
    every = fields.optional_integer("moe_layer_freq") or 1
    first = fields.optional_integer("first_k_dense_replace", low=0) or 0
    return (index + 1) % step == 0 and index >= first and index % every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsFamily:
    """How a family's experts differ from Mixtral's; everything else is in its config files."""

    names: ExpertNames = ExpertNames()
    scores: Scores = "softmax"
    correction_bias: str | bool = False  # A text names the config's flag for it.
    normalize_eps: float = 1e-20
    router_bias: bool = False
    group_best: int = 1
    float32: bool = False  # the router's product is computed in float32
    weights_inputs: bool = False
    bias: bool = False
    clamped_gate: bool = False  # the activation has the config's swiglu_alpha and swiglu_limit
    has_experts: Callable[[Fields, int], bool] = has_experts
    top_k_key: str = "num_experts_per_tok"


def read_experts(family: ExpertsFamily, fields: Fields) -> ExpertsConfig | None:
    """The experts of the layers that have them; None if the config has no experts at all."""
    names = ("num_experts", "n_routed_experts", "moe_num_experts")
    name = next((name for name in names if name in fields), "num_local_experts")
    num_experts = fields.integer(name, low=0, high=2**16)
    if not num_experts:
        return None
    scores = fields.raw("scoring_func")
    if scores == "noaux_tc":  # dots.llm1 names its way of choosing experts
        scores = "sigmoid"
    if scores not in (None, "softmax", "sigmoid"):
        raise UnsupportedModel(f"scoring_func {scores!r} is not supported; supported: softmax, sigmoid")
    top_k, bias = fields.integer(family.top_k_key), family.correction_bias
    num_groups = (fields.optional_integer("n_group") or 1) if fields.raw("topk_method") != "greedy" else 1
    top_groups = min(fields.optional_integer("topk_group") or num_groups, num_groups)
    size, rest = divmod(num_experts, num_groups)
    if rest:
        raise CorruptCheckpoint(f"config.json: n_group ({num_groups}) must divide the {num_experts} experts")
    if top_k > top_groups * size:
        where = "experts" if num_groups == 1 else f"experts of {top_groups} groups"
        raise CorruptCheckpoint(
            f"config.json: {family.top_k_key} ({top_k}) must not exceed the {top_groups * size} {where}"
        )
    routing = Routing(
        num_experts=num_experts,
        top_k=top_k,
        scores=scores or family.scores,
        normalize=fields.flag("norm_topk_prob"),
        scale=fields.optional_number("routed_scaling_factor") or 1.0,
        normalize_eps=family.normalize_eps,
        correction_bias=bias if isinstance(bias, bool) else fields.flag(bias),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=min(family.group_best, size),
        router_bias=family.router_bias,
        float32=family.float32,
        weights_inputs=family.weights_inputs,
    )
    gate = None
    if family.clamped_gate:
        gate = ClampedGate(fields.number("swiglu_alpha"), fields.number("swiglu_limit"))
    return ExpertsConfig(
        routing,
        family.names,
        _shared_size(fields) if family.names.shared is not None else 0,
        bias=family.bias,
        clamped_gate=gate,
        latent_size=fields.optional_integer("moe_latent_size") or 0,
    )


def expert_size(fields: Fields) -> int:
    """The inner size of each routed expert."""
    return fields.optional_integer("moe_intermediate_size") or fields.integer("intermediate_size")


def _shared_size(fields: Fields) -> int:
    """The inner size of the shared expert: given, or that of several routed ones."""
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    stated = next((fields.integer(name, low=0) for name in names if name in fields), None)
    name = "n_shared_experts" if "n_shared_experts" in fields else "moe_num_shared_experts"
    count = fields.optional_integer(name, low=0)
    return (count or 0) * expert_size(fields) if stated is None else stated
