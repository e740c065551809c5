"""A mergekit file of slices is the plan that it says, for a model of that many layers, and nothing else is one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import TEXT, Done, make_tiny
from hypothesis import given
from hypothesis import strategies as st

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import find_structure, identify
from lyapunov_prune.pruning import MergekitSlices
from lyapunov_prune.pruning.mergekit import read_plan
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance

# As PruneMe writes it, and as a model card shows it.
PRUNEME = """\
slices:
  - sources:
    - model: mistralai/Mistral-7B-Instruct-v0.2
      layer_range: [0, 2]
  - sources:
    - model: mistralai/Mistral-7B-Instruct-v0.2
      layer_range: [4,6]

merge_method: passthrough
dtype: bfloat16
"""
CARD = """\
dtype: bfloat16
merge_method: passthrough
slices:
- sources:
  - layer_range: [0, 2]
    model: &m meta-llama/Meta-Llama-3.1-8B
- sources:
  - layer_range:
    - 4
    - 6
    model: *m
"""
# Each line ten times the one before, a gigabyte when it is written out.
BOMB = "a: &a [1]\n" + "\n".join(f"{b}: &{b} [{', '.join(['*' + a] * 10)}]" for a, b in pairwise("abcdefghi"))


def slices(*ranges: Any, **more: Any) -> dict[str, Any]:
    """A mergekit file as what YAML holds; a range may bring more of its source."""
    sources = [each if isinstance(each, dict) else {"layer_range": list(each)} for each in ranges]
    pieces = [{"sources": [{"model": "org/model", **source}]} for source in sources]
    return {"slices": pieces, "merge_method": "passthrough", **more}


def saved(content: Any, path: Path) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", [PRUNEME, CARD], ids=["PruneMe", "model card"])
@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_what_no_slice_has_is_removed(text: str, suffix: str, tmp_path: Path) -> None:
    read = read_plan(saved(text, tmp_path / f"x.{suffix}"))
    assert isinstance(read, MergekitSlices)
    model = make_tiny("llama")
    assert read.plan(identify(model)).to_json() == PruningPlan.given(model, [2, 3]).to_json()


@given(st.sets(st.integers(0, 5), min_size=1, max_size=5))
def test_every_set_of_layers_but_the_last_can_be_written(kept: set[int]) -> None:
    ranges = tuple((layer, layer + 1) for layer in sorted(kept | {5}))
    model = PruningPlan.given(make_tiny("llama"), [0]).model
    if len(ranges) == 6:
        with pytest.raises(LyapunovPruneError, match="removes no layer"):
            MergekitSlices("x.yaml", "m", ranges).plan(model)
    else:
        assert set(MergekitSlices("x.yaml", "m", ranges).plan(model).kept) == kept | {5}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("slices: [", "as YAML"),
        ("- 1", "has no slices"),
        ("", "has no slices"),
        ({"slices": [], "merge_method": "passthrough"}, "has no slices"),
        ({"models": [{"model": "a"}], "merge_method": "linear"}, "has no slices"),
        (slices((0, 2), (4, 6), merge_method="slerp"), "merges by slerp"),
        (slices((0, 4), (2, 6)), "takes layer 2 twice"),
        (slices((0, 2), (0, 2), (4, 6)), "takes layer 0 twice"),
        (slices((3, 6), (2, 4)), "takes layer 3 twice"),
        (slices((4, 6), (0, 2)), "layer 0 behind layer 5"),
        (slices({"layer_range": [0, 2]}, {"layer_range": [4, 6], "model": "b"}), "org/model and of b"),
        (slices((0, 2), {"layer_range": [4, 6], "parameters": {"scale": 0.5}}), "by parameters"),
        (slices((0, 2), (4, 6), parameters={"scale": 0.5}), "by parameters"),
        ({"slices": [{"sources": [{}, {}]}], "merge_method": "passthrough"}, "slice 0 .*one source"),
        ({"slices": ["x"], "merge_method": "passthrough"}, "slice 0 .*one source"),
        *(
            (slices((0, 2), {"layer_range": wrong}), "slice 1 has layer_range")
            for wrong in (None, [], [4], [4, 4], [6, 4], [-1, 4], [4.0, 6.0], ["4", "6"], 4, [0, 1, 2])
        ),
        (
            BOMB + "\nslices: [{sources: [{layer_range: *i}]}]\nmerge_method: passthrough",
            "slice 0 .*layer_range",
        ),
        (BOMB + "\nslices: [1]\nmerge_method: *i", "merges by"),
        ("[" * 5000, "as YAML"),
    ],
)
def test_what_is_no_removal_of_layers_is_one_line(content: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=told) as raised:
        read_plan(saved(content, tmp_path / "x.yaml"))
    assert "x.yaml" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("ranges", [((0, 2), (4, 5)), ((0, 2), (4, 7)), ((0, 21), (29, 32))])
def test_a_model_of_other_layers_is_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    end = ranges[-1][1] - 1
    with pytest.raises(LyapunovPruneError, match=f"layer {end}, .*5"):
        MergekitSlices("x.yaml", "m", ranges).plan(identify(make_tiny("llama")))


@pytest.mark.parametrize(
    "more", [[], ["--device", "disk"], ["--mend", "--tokens", "512"]], ids=["in memory", "on disk", "mended"]
)
def test_prune_takes_it_as_a_plan(more: list[str], run: Any) -> None:
    Path("slices.yaml").write_text(PRUNEME)
    text = [] if "disk" in more else TEXT
    done: Done = run("prune", "tiny", "--plan", "slices.yaml", *text, *more, "-o", "out")
    assert done.code == 0, done.err
    assert "mistralai/Mistral-7B-Instruct-v0.2" in done.err
    assert Provenance.load("out/provenance.json").plan.remove == (2, 3)
    assert run("prune", "tiny", "--layers", "2,3", *text, *more, "-o", "same").code == 0
    weights = [Path(folder, "model.safetensors").read_bytes() for folder in ("out", "same")]
    assert weights[0] == weights[1]


def test_prune_refuses_slices_before_the_text_is_read(run: Any) -> None:
    Path("slices.yaml").write_text(PRUNEME.replace("[4,6]", "[4,32]"))
    done: Done = run("prune", "tiny", "--plan", "slices.yaml", "--text", "org/set", "-o", "out")
    assert done.code == 2
    assert "layer 31, the model with 5" in done.err
    assert not Path("out").exists()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_neox"])
def test_families(family: str) -> None:
    model = make_tiny(family)
    layers = find_structure(model).num_layers
    plan = MergekitSlices("x.yaml", "m", ((0, 1), (2, layers))).plan(identify(model))
    assert plan.remove == (1,)
