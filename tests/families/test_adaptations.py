"""Single entries of the family table where the zoo's own sets of layers do not reach every branch."""

from __future__ import annotations

import pytest
import torch
from families.test_faults import ENTRIES
from families.zoo import CHANGES, LAYERS, make_zoo

from lyapunov_prune import LyapunovPruneError, remove_layers
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure, identify
from lyapunov_prune.pruning.surgery import refusal
from lyapunov_prune.ranking import best_removal, search


def test_ngram_tables_after_the_first_keep_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tables, of layers 0, 3 and 6: the sizes of those left have to follow each other."""
    monkeypatch.setitem(CHANGES["qwen4_exp_text"], "ple_layer_ids", [1, 4, 7])
    model = make_zoo("qwen4_exp_text")
    layers = find_structure(model).layers
    second, third = (layers[i].get_submodule("ple.ple_embedding").head_vocab_sizes[0] for i in (3, 6))
    for removed, base in (([0], second), ([0, 3], third), ([6], 50), ([0, 3, 6], 50)):
        pruned = remove_layers(model, removed)  # through the gate
        assert pruned.config.ngram_vocab_size_base == base
    with pytest.raises(LyapunovPruneError, match="layers 0, 6"):
        remove_layers(model, [3])


def test_the_norm_of_the_embeddings_cannot_leave_with_the_first_layer() -> None:
    model = make_zoo("rwkv")
    with pytest.raises(LyapunovPruneError, match="pre_ln"):
        remove_layers(model, [0])


@pytest.mark.parametrize("entry", ENTRIES)
def test_to_ask_whether_layers_can_go_changes_no_weight(entry: str) -> None:
    name, layers = ENTRIES[entry]
    model = make_zoo(name)
    before = identify(model)
    refusal(wrap(model), layers)
    refusal(wrap(model), [LAYERS - 1])
    assert identify(model) == before


@pytest.mark.parametrize(("name", "mend"), [("beam", False), ("jamba", True)])
def test_best_tries_only_sets_that_can_go(name: str, mend: bool) -> None:
    model, ids = make_zoo(name), torch.randint(3, 90, (8, 16), generator=torch.Generator().manual_seed(0))
    found = best_removal(model, ids, 2, mend=mend, judge=ids.flip(0) if mend else None)
    assert all(refusal(wrap(model), tried.layers) is None for tried in found.tried)
    remove_layers(model, found.remove)


def test_best_tries_the_last_layers_where_nothing_else_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_zoo("jamba"), torch.randint(3, 90, (8, 32), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(search, "refusal", lambda decoder, layers: None if layers == (6, 7) else "it cannot")
    found = best_removal(model, ids, 2)
    assert [tried.layers for tried in found.tried] == [(6, 7)]
    monkeypatch.setattr(search, "refusal", lambda decoder, layers: "it cannot")
    with pytest.raises(LyapunovPruneError, match="it cannot"):
        best_removal(model, ids, 2)


@torch.no_grad()
def test_the_first_router_takes_nothing_from_a_layer_before() -> None:
    model = make_zoo("zaya")
    pruned = remove_layers(model, [0, 1])
    assert not any("layers.0" in name and "router_states_scale" in name for name in pruned.state_dict())
    assert sum("router_states_scale" in name for name in pruned.state_dict()) == LAYERS - 3
    assert "router_states_scale" in dict(find_structure(model).layers[2].mlp.gate.named_parameters())  # the original's
