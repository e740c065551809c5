"""What a matrix does inside its layer, from the names that decoders give it; weights that are no matrix, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lyapunov_prune.models.families import UNTAKEN
from lyapunov_prune.models.projections import Projection, routes
from lyapunov_prune.models.structure import Structure

# Role -> ends of a component's path; the longest matching end decides. All others are `other`: fused projections that
# stay whole, latent attention, state spaces, adapters.
NAMES: dict[str, tuple[str, ...]] = {
    "query": ("q_proj", "query_proj", "self.query", "c_attn.q", "qkv_proj.q", "query_key_value.q", "Wqkv.q"),
    "key": ("k_proj", "key_proj", "self.key", "c_attn.k", "qkv_proj.k", "query_key_value.k", "Wqkv.k"),
    "value": ("v_proj", "value_proj", "self.value", "c_attn.v", "qkv_proj.v", "query_key_value.v", "Wqkv.v"),
    "attention-output": (
        "o_proj", "attn.c_proj", "attn.out_proj", "self_attn.out_proj", "attention.out_proj", "attn.Wo",
        "attention.dense", "self_attention.dense", "self_attn.dense", "attention.output.dense",
    ),
    "mlp-in": (
        "gate_proj", "up_proj", "gate_up_proj", "gate_up_proj.gate", "gate_up_proj.up", "c_fc", "fc1", "fc_in",
        "dense_h_to_4h", "mlp.Wi", "w1", "w3", "experts.mlp.v1", "shared_mlp.input_linear", "intermediate.dense",
        "ffn.0", "mlp.input_linear",
    ),
    "mlp-out": (
        "down_proj", "mlp.c_proj", "fc2", "fc_out", "dense_4h_to_h", "mlp.Wo", "w2", "shared_mlp.output_linear",
        "output.dense", "ffn.2", "mlp.output_linear",
    ),
    # Names as above with another meaning: gates of attention and norms, routers, linear attention, token embeddings.
    "other": (
        "input_layernorm.mlp.fc1", "input_layernorm.mlp.fc2",
        "self_attn.gate_proj", "gate.down_proj", "router_mlp.fc1", "router_mlp.fc2", "linear_attn.q_proj",
        "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.o_proj", "linear_attn.out_proj", "ple.key_proj",
        "ple.value_proj",
    ),
}  # fmt: skip
ROLES = {name: role for role, names in NAMES.items() for name in names}


def role(component: str) -> str:
    """The role of a `Projection.component`: one of the keys of `NAMES`.

    A gate beside the matrix into the MLP counts as `mlp-in`.
    """
    parts = component.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    return next((ROLES[end] for end in ends if end in ROLES), "other")


ROUTERS = "routers, whose errors change which expert a token gets"
EMBEDDINGS = "embeddings, whose rows are looked up"
UNKNOWN = "weights of a form that is not known, with no row in models/families.py"
# Parameters of more than one dimension that multiply or add to features entry by entry, like vectors.
_VECTORS = ("A_log", "D", "scale", "query", "seg_embed", "time_mix_key", "time_mix_value", "time_mix_receptance")


@dataclass(frozen=True)
class LeftAlone:
    """Weights of a model that stay unchanged: the reason, the names of the parameters, and their number of entries."""

    why: str
    names: tuple[str, ...]
    entries: int

    def __str__(self) -> str:
        return f"{len(self.names)} {self.why} ({self.names[0]}{', …' * (len(self.names) > 1)})"


def left_alone(structure: Structure, matrices: Sequence[Projection]) -> tuple[LeftAlone, ...]:
    """The weights in the layers besides `matrices` and vectors, by reason; the model may be on the meta device.

    Vectors (norms, biases, decays) are not listed, even if stacked by head or expert. A weight shared by layers counts
    once.
    """
    found: dict[str, dict[str, int]] = {}
    before = len(f"{structure.layers_path}.")
    owners = {p.module: structure.layers.get_submodule(p.module[before:]) for p in matrices}
    seen: set[nn.Parameter] = {getattr(owners[p.module], p.parameter) for p in matrices}
    for index, layer in enumerate(structure.layers):
        name = f"{structure.layers_path}.{index}"
        for path, module in layer.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                vector = parameter.ndim < 2 or key in _VECTORS or key.endswith("bias")
                if not vector and parameter not in seen:
                    seen.add(parameter)
                    inside = f"{path}.{key}" if path else key
                    found.setdefault(_why(layer, path, module), {})[f"{name}.{inside}"] = parameter.numel()
    return tuple(LeftAlone(why, tuple(sizes), sum(sizes.values())) for why, sizes in found.items())


def left_alone_lines(left: Sequence[LeftAlone]) -> list[str]:
    """The line for a report; no line if nothing was left alone."""
    return [f"Left as they are: {'; '.join(map(str, left))}."] if left else []


def why_unseen(p: Projection) -> str:
    """Why no input of a matrix is seen while the model runs on text."""
    if p.expert is not None:
        return "the router sends this expert no token: give more text"
    if any(part in p.module for part in ("encoder_attn", "cross_attn", "crossattention")):
        return "attention to an encoder or to images, which text alone does not use"
    if "adapter_list" in p.module:
        return "the layer holds the adapters of other layers too, and uses its own alone"
    return "the model does not run it on text, or multiplies by it in a fused kernel"


def _why(layer: nn.Module, path: str, module: nn.Module) -> str:
    if routes(layer, path):
        return ROUTERS
    if isinstance(module, nn.modules.conv._ConvNd):
        return UNTAKEN["Convolution"]
    if isinstance(module, nn.Embedding):
        return EMBEDDINGS
    return next((why for word, why in UNTAKEN.items() if word in type(module).__name__), UNKNOWN)
