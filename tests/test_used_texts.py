"""No committed result reports on a text that a decision has looked at, unless its page says so."""

from __future__ import annotations

import copy
import json

import pytest
import tables

from experiments import cut_texts, used_texts


def test_every_committed_result_reports_on_a_text_that_it_may() -> None:
    assert used_texts.faults() == []


def test_what_is_listed_as_burnt_or_untold_is_there() -> None:
    known = used_texts.texts()
    assert set(known["burnt"]) | set(known["untold"]) <= set(used_texts.paths())


def planted(fault: str) -> list[str]:
    known = copy.deepcopy(used_texts.texts())
    path, record = next((p, r) for p, field, r in used_texts.committed() if field == "measured_on")
    h = record["text_hash"][: used_texts.DIGITS]
    if fault == "burnt":
        known["burnt"].remove(path)
    elif fault == "unknown":
        for role in ("fit", "choose"):
            known[role] = {name: [x for x in hashes if x != h] for name, hashes in known[role].items()}
    elif fault == "untold":
        known["untold"].pop()
    elif fault == "default":
        known["defaults"][0]["chosen_on"].append("report-c4.txt")
    else:
        known["report"]["report-c4.txt"]["text_hashes"].append(h)
    return used_texts.faults(known)


@pytest.mark.parametrize("fault", ["burnt", "unknown", "untold", "default", "both"])
def test_planted_fault_a_text_that_may_not_report_is_seen(fault: str) -> None:
    assert planted(fault)


def test_make_tables_refuses_a_report_on_a_burnt_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tables.refuse_burnt()
    monkeypatch.setattr(used_texts, "texts", lambda: used_texts_without_marks)
    used_texts_without_marks = json.loads(used_texts.FILE.read_text(encoding="utf-8")) | {"burnt": []}
    with pytest.raises(SystemExit, match="report on another"):
        tables.refuse_burnt()


def test_a_cut_is_the_whole_documents_of_the_last_fifth() -> None:
    assert cut_texts.last(["a" * 8, "b", "c"]) == ["b", "c"]
    assert cut_texts.last(["a" * 7, "b" * 2, "c"]) == ["c"]
