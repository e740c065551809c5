"""What a matrix does inside its layer, from the names that decoders give it."""

from __future__ import annotations

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
