"""Every matrix of every family takes part in calibration, or is named with the reason why it does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from families.verdicts import load_table
from families.zoo import ALIKE, ZOO, each_by_itself, make_zoo
from helpers import hooks_of
from torch import nn

from lyapunov_prune import LyapunovPruneError, check_bounds, compress
from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.families import BARE, UNTAKEN
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.roles import EMBEDDINGS, ROUTERS, UNKNOWN, LeftAlone, left_alone
from lyapunov_prune.models.structure import find_structure

CONVOLUTIONS, STREAMS = UNTAKEN.values()

# Parameters of more than one dimension that are no matrices: biases and decays by head or expert, scales, vectors.
NO_MATRIX = re.compile(r"(bias|\.A_log|\.D|\.scale|\.query|\.seg_embed|\.time_mix_\w+)$")
# Families of which calibration refuses a matrix by name, and why.
_NO_ENCODER = r"no product with .*(encoder|cross)_attn\.\w+ is seen .*attention to an encoder"
REFUSED = {
    **dict.fromkeys(
        ["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
         "prophetnet", "trocr", "whisper"], _NO_ENCODER),
    "mllama": _NO_ENCODER,
    "zamba2": r"no product with .*_adapter_list\.\d.* is seen .*adapters of other layers",
}  # fmt: skip
# Families with matrices of a form that is not known, which is said of each.
NOT_KNOWN = {"xlnet": r"rel_attn\.[qkvor]$"}  # multiplied by einsum, and no causal decoder


def tokens() -> torch.Tensor:
    return torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))


def built(name: str) -> Any:
    if load_table()[name]["control"].startswith("cannot be built"):
        pytest.skip("this decoder cannot be built here")
    try:
        model = make_zoo(name)
        find_structure(model)
    except LyapunovPruneError as error:
        pytest.skip(f"its layers are not found: {error}")
    return model


def listed_of(model: Any) -> tuple[LeftAlone, ...]:
    return left_alone(find_structure(model), find_projections(wrap(model)))


def unnamed(model: Any) -> list[str]:
    """Weights inside the layers that are neither matrices nor listed with a reason that is known."""
    structure = find_structure(model)
    projections = find_projections(wrap(model))
    named = {id(p.stored(model)) for p in projections}
    listed = {name for left in left_alone(structure, projections) if left.why != UNKNOWN for name in left.names}
    inside = [(name, p) for name, p in model.named_parameters() if name.startswith(f"{structure.layers_path}.")]
    return [n for n, p in inside if p.ndim > 1 and id(p) not in named and n not in listed and not NO_MATRIX.search(n)]


@pytest.mark.parametrize("name", each_by_itself(name for name in ZOO if name not in ALIKE))
def test_every_matrix_is_calibrated_or_named_with_the_reason(name: str) -> None:
    model = built(name)
    if name in REFUSED:
        with pytest.raises(LyapunovPruneError, match=REFUSED[name]):
            input_norms(model, tokens(), find_projections(wrap(model)))
        return
    assert all(re.search(NOT_KNOWN.get(name, "$^"), path) for path in unnamed(model))
    projections = find_projections(wrap(model))
    norms = input_norms(model, tokens(), projections)
    assert hooks_of(model) == 0
    assert set(norms) == {p.name for p in projections}
    for p in projections:
        assert norms[p.name].shape == (p.weight(model).shape[1],)
        assert norms[p.name].isfinite().all(), p.name
        assert norms[p.name].any(), p.name


@pytest.mark.parametrize(
    "name", ["mamba", "jamba", "dbrx", "recurrent_gemma", "zamba", "longcat_flash", "inkling_text"]
)
def test_every_matrix_is_calibrated_in_half_precision(name: str) -> None:
    """A family that casts a weight before it multiplies would hide it."""
    model = built(name).bfloat16()
    projections = find_projections(wrap(model))
    assert set(input_norms(model, tokens(), projections)) == {p.name for p in projections}


@pytest.mark.parametrize(("name", "hidden"), [("dbrx", "DbrxExperts"), ("zamba", "ZambaMambaMixer")])
def test_planted_fault_a_matrix_without_its_row_is_seen(
    name: str, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(name)
    assert not unnamed(model)
    monkeypatch.delitem(BARE, hidden)
    assert unnamed(model)
    (told,) = (left for left in listed_of(model) if left.why == UNKNOWN)
    assert len(told.names) == len(unnamed(model))


def test_a_linear_of_another_class_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with a weight that is no Linear is not passed over in silence."""

    class Own(nn.Module):
        def __init__(self, before: nn.Linear) -> None:
            super().__init__()
            self.matrix = nn.Parameter(before.weight.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.matrix.T

    model = make_zoo("llama")
    model.model.layers[3].mlp.up_proj = Own(model.model.layers[3].mlp.up_proj)
    (told,) = listed_of(model)
    assert (told.why, told.names) == (UNKNOWN, ("model.layers.3.mlp.up_proj.matrix",))


@pytest.mark.parametrize(
    ("name", "whys"),
    [("llama", []), ("mixtral", [ROUTERS]), ("jamba", [CONVOLUTIONS, ROUTERS]), ("hy_v4", [STREAMS, ROUTERS]),
     ("qwen4_exp_text", [CONVOLUTIONS, ROUTERS, EMBEDDINGS])],
)  # fmt: skip
def test_reports_say_what_is_left_alone(name: str, whys: list[str]) -> None:
    model = make_zoo(name)
    report = compress(model, method="magnitude", sparsity=0.5).report
    assert [left.why for left in report.left_alone] == whys
    told = [line for line in report.answer() if line.startswith("Left as they are")]
    assert len(told) == bool(whys)
    assert all(why in told[0] for why in whys)
    assert all(left.names[0] in told[0] for left in report.left_alone)
    if name in ("llama", "mixtral"):
        bounds = check_bounds(model, tokens()[:1])
        assert bounds.left_alone == report.left_alone
        assert all(line in bounds.answer() for line in told)
