"""A state read behind a branch, and logits without the final norm: by hand, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, directions_by_definition, hooks_of, make_tiny, predictions_by_definition
from predictions.test_hierarchy import LAYER, PARTS, STEPS, T, changed_by_hand, make_double

from lyapunov_prune import LyapunovPruneError, compress, probe_layers
from lyapunov_prune.forward.sublayers import find_sublayers
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions.spaces import LOGITS

# What the stream enters behind the attention.
BEHIND = {"llama": "post_attention_layernorm", "gpt2": "ln_2", "gemma2": "pre_feedforward_layernorm"}


@pytest.fixture
def prompts(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, :7]


def entering(twin: Any, name: str, text: torch.Tensor) -> torch.Tensor:
    """The stream behind the attention of LAYER, at the last STEPS tokens of `text`."""
    found: list[torch.Tensor] = []
    place = find_structure(twin).layers[LAYER].get_submodule(BEHIND[name])
    hook = place.register_forward_pre_hook(lambda m, args: found.append(args[0]))
    twin(text, use_cache=False)
    hook.remove()
    return found[0][:, -STEPS:]


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("change", ["dropped", "compressed"])
@pytest.mark.parametrize("name", list(BEHIND))
@torch.no_grad()
def test_an_attention_is_read_before_the_mlp_has_run(
    name: str, change: str, final_norm: bool, prompts: torch.Tensor
) -> None:
    model = make_double(name)
    compressed = compress(model, method="magnitude", sparsity=0.1).model if change == "compressed" else None
    found = probe_layers(
        model,
        prompts,
        change=compressed or "dropped",
        steps=STEPS,
        temperature=T,
        read_at="branch",
        final_norm=final_norm,
        batch_size=2,
    )
    text = prompts
    for _ in range(STEPS - 1):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    h = entering(model, name, text)
    h2 = entering(changed_by_hand(model, name, "attention", compressed), name, text)
    norm = model.get_submodule(PARTS[name][1]) if final_norm else torch.nn.Identity()
    z, z2 = (model.get_output_embeddings()(norm(x)) for x in (h, h2))
    if name == "gemma2":
        z, z2 = (2 * torch.tanh(x / 2) for x in (z, z2))
    h, h2, z, z2 = (x.numpy() for x in (h, h2, z, z2))
    wanted = directions_by_definition(h, h2 - h)
    wanted |= dict(zip(LOGITS, directions_by_definition(z, z2 - z).values(), strict=True))
    measures = predictions_by_definition(z, z2 - z, T)
    wanted |= {key: measures[key] for key in ("probability", "kl", "kl_estimate", "uniform_variance")}
    i = found.what.index("attention")
    for key, values in wanted.items():
        mine = getattr(found, key)[i, LAYER]
        # Gemma takes its norms in float32 whatever the dtype of its weights.
        np.testing.assert_allclose(mine, values.mean(0), rtol=1e-3 if name == "gemma2" else 1e-7, atol=1e-12)
    assert (found.read_at, found.final_norm) == ("branch", final_norm)
    assert f"where the branch ends, logits with{'' if final_norm else 'out'} the final norm" in found.headline()
    assert hooks_of(model) == 0


@torch.no_grad()
def test_what_ends_with_the_layer_is_read_there(prompts: torch.Tensor) -> None:
    model = make_double("llama")
    layer, branch = (probe_layers(model, prompts, steps=STEPS, read_at=at) for at in ("layer", "branch"))
    for part in ("layer", "mlp"):
        i = layer.what.index(part)
        np.testing.assert_allclose(branch.hidden[i], layer.hidden[i], rtol=1e-9)
        np.testing.assert_allclose(branch.kl[i], layer.kl[i], rtol=1e-9)
    i = layer.what.index("attention")
    assert (np.abs(branch.hidden[i] / layer.hidden[i] - 1) > 0.01).any()
    alone = probe_layers(model, prompts, steps=STEPS, read_at="branch", what=("attention",))
    np.testing.assert_allclose(alone.kl[0], branch.kl[i], rtol=1e-9)


def test_every_family_is_read_behind_its_branches_or_says_why_not(family: str, prompts: torch.Tensor) -> None:
    model = make_tiny(family)
    if any(found.parallel for found in find_sublayers(wrap(model), range(LAYERS)).values()):
        with pytest.raises(LyapunovPruneError, match="side by side"):
            probe_layers(model, prompts, read_at="branch")
        return
    found = probe_layers(model, prompts, steps=2, read_at="branch")
    assert np.isfinite(found.kl[found.what.index("layer")]).all()
    assert not found.violations


def test_another_place_is_refused(prompts: torch.Tensor) -> None:
    anywhere: Any = "norm"
    with pytest.raises(LyapunovPruneError, match="'norm'"):
        probe_layers(make_tiny("llama"), prompts, read_at=anywhere)
