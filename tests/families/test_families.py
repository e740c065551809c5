"""Every decoder of transformers: removed correctly or refused with a reason, and never worse than the table says."""

from __future__ import annotations

import pytest
from families.features import FEATURES, NONE, WRONG, YES, judge_features
from families.verdicts import PAGE, judge, load_table, page
from families.zoo import ALIKE, ZOO, each_by_itself, make_zoo, model_type_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lyapunov_prune.models.families import FAMILIES, JUDGED


def test_the_table_holds_every_family() -> None:
    assert set(map(model_type_of, ZOO)) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert tuple(load_table()) == ZOO


def test_on_disk_only_families_of_the_table_are_taken() -> None:
    assert {model_type_of(name) for name, row in load_table().items() if row["control"] == YES} == JUDGED


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(load_table()), "run python tests/families/verdicts.py"


# All families take minutes: `verdicts.py` judges them, and the table is what it wrote.
@pytest.mark.parametrize("name", ["bart", "dbrx", "llama"])
def test_features_are_as_the_table_says(name: str) -> None:
    assert judge_features(lambda: make_zoo(name)) == load_table()[name]["features"]


def test_no_feature_is_wrong() -> None:
    rows = load_table()
    assert all(list(row["features"]) == list(FEATURES) for row in rows.values())
    verdicts = {(name, label): found for name, row in rows.items() for label, found in row["features"].items()}
    assert not [key for key, found in verdicts.items() if found.startswith(WRONG)]
    untried = {name for name, row in rows.items() if set(row["features"].values()) == {NONE}}
    assert untried == {name for name, row in rows.items() if row["control"] != YES}


@pytest.mark.slow
@pytest.mark.parametrize("name", each_by_itself(ZOO))
def test_is_no_worse_than_the_table_says(name: str) -> None:
    was = load_table()[name]
    # Where all sets had one verdict, one stands for the others; with a row of the family's own the two that hold every
    # place of a layer and every distance. Where another family has the same matrices, these are measured there.
    alike = len(set(was["removals"].values())) == 1
    own = 2 if model_type_of(name) in FAMILIES else 1
    sets = ("two apart (2, 5)", "all but one (2)")[:own] if alike else tuple(was["removals"])
    # What the control asks of the model as it came, the gate asks of what passes it.
    passes = YES in [was["removals"].get(label) for label in sets]
    now = judge(name, sets, measured=name not in ALIKE, controlled=not passes)
    for part in ("control", "measured", "checked")[: 1 if name in ALIKE else 3]:
        assert now[part] == YES or was[part] != YES, f"{name}, {part}: {now[part]}"
    for label in sets:
        verdict, found = was["removals"][label], now["removals"].get(label, "not tried")
        assert found == YES or verdict != YES, f"{name}, {label}: {found}"
        assert not found.startswith(WRONG), f"{name}, {label}: {found}"
    for part in ("measured", "checked"):
        assert not now[part].startswith(WRONG), f"{name}: {now[part]}"
