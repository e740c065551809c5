"""Names of modules in quantisation settings: they follow their layers, are dropped with them, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.quantised_names import Layers, matches

PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.3.up_proj")
TOTAL = 12
KEPT = (0, 2, 3, 5, 7, 11)


def layers(path: str = "model.layers", *others: str, stored: str = "") -> Layers:
    paths = {path, stored or path}
    inside = {f"{each}.{i}.{part}" for each in paths for i in range(TOTAL) for part in PARTS}
    outside = {f"{other}.{i}.{part}" for other in others for i in range(TOTAL) for part in PARTS}
    return Layers(frozenset(paths), frozenset(inside | outside | {"lm_head", "model.embed_tokens"}), KEPT)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("lm_head", "lm_head"),
        ("Linear", "Linear"),
        ("0.9.0", "0.9.0"),
        ("self_attn.q_proj", "self_attn.q_proj"),
        ("mlp.experts.3.up_proj", "mlp.experts.3.up_proj"),
        ("model.layers.0.mlp", "model.layers.0.mlp"),
        ("model.layers.11.mlp.experts.3.up_proj", "model.layers.5.mlp.experts.3.up_proj"),
        ("model.layers.1.mlp", None),
        ("layers.3", "layers.2"),
        ("model.layers.*.self_attn", "model.layers.*.self_attn"),
        ("model.layers.3.self_attn*", "model.layers.2.self_attn*"),
        ("re:.*mlp\\.gate$", "re:.*mlp\\.gate$"),
        ("re:.*layers\\.3\\..*", "re:.*layers\\.2\\..*"),
        ("re:.*layers.11.self_attn", "re:.*layers.5.self_attn"),
        ("re:.*layers\\.(1|3|5|8)\\.mlp", "re:.*layers\\.(2|3)\\.mlp"),
        ("re:.*layers\\.(?:7|11)\\.mlp", "re:.*layers\\.(?:4|5)\\.mlp"),
        ("re:.*layers\\.[0123]\\.mlp", "re:.*layers\\.[012]\\.mlp"),
        ("re:.*layers\\.(1|4)\\.mlp", None),
        ("re:.*layers\\.\\d+\\.mlp\\.experts\\.3\\.", "re:.*layers\\.\\d+\\.mlp\\.experts\\.3\\."),
        ("-:model\\.layers\\.5\\.", "-:model\\.layers\\.3\\."),
        ("+:.*\\.11\\..*gate.*", "+:.*\\.5\\..*gate.*"),
        ("re:vision_tower.*", "re:vision_tower.*"),
        ("re:.*layers\\.5\\.nothing", "re:.*layers\\.3\\.nothing"),
    ],
)
def test_a_name_follows_its_layer(before: str, after: str | None) -> None:
    assert layers().follow([before]) == ([] if after is None else [after])
    settings: dict[str, Any] = {"dynamic": {before: {"bits": 8}}, "bits": 4, "none": None}
    assert layers().follow(settings) == settings | {"dynamic": {} if after is None else {after: {"bits": 8}}}


@pytest.mark.parametrize(
    "name",
    [
        "re:.*layers\\.[0-3]\\.mlp",  # a range
        "re:.*layers\\.1?3\\..*",
        "+:.*\\.3\\..*",  # the experts of that number too
        "re:.*layers\\.3\\.mlp|.*layers\\.4\\.mlp",  # one of both leaves
    ],
)
def test_what_cannot_follow_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(LyapunovPruneError) as refused:
        layers().follow({"ignore": ["lm_head", name]})
    assert name in str(refused.value)


def test_a_range_whose_layers_all_stay_where_they_are_is_kept() -> None:
    kept = Layers(frozenset({"model.layers"}), layers().modules, (0, 1, 2, 3, 7))
    assert kept.follow(["re:.*layers\\.[0-3]\\.mlp"]) == ["re:.*layers\\.[0-3]\\.mlp"]


def test_the_layers_of_a_vision_tower_stay() -> None:
    whole = layers(
        "model.language_model.layers", "model.vision_tower.encoder.layers", stored="language_model.model.layers"
    )
    assert whole.follow(["model.vision_tower.encoder.layers.3.self_attn"]) == [
        "model.vision_tower.encoder.layers.3.self_attn"
    ]
    for path in ("model.language_model.layers", "language_model.model.layers", "language_model.layers"):
        assert whole.follow([f"{path}.3.self_attn", f"{path}.4.self_attn"]) == [f"{path}.2.self_attn"]
    for unclear in ("layers.3.self_attn", "other.layers.3.self_attn", "re:.*layers\\.3\\.self_attn"):
        with pytest.raises(LyapunovPruneError) as refused:
            whole.follow([unclear])
        assert unclear in str(refused.value)


def test_names_are_grouped_by_the_layer_that_they_name() -> None:
    told = layers().by_layer({"ignore": ["lm_head", "layers.3.mlp", "re:.*layers\\.3"], "bits": 4})
    assert told == {None: {"ignore", "bits", "lm_head"}, 3: {"layers.*.mlp"}}


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("model.layers.1", True),
        ("layers.1.mlp", False),
        ("q_proj", True),
        ("proj", False),
        ("re:model", True),
        ("re:layers", False),
        ("model.layers.1*", True),
        ("model.layers.[", False),
    ],
)
def test_a_pattern_is_read_as_the_libraries_do(pattern: str, matched: bool) -> None:
    assert matches(pattern, "model.layers.1.self_attn.q_proj") == matched
    assert not matches("model.layers.1", "model.layers.11.self_attn.q_proj")
