"""No committed result reports on a text that a decision has looked at, unless its page says so."""

from __future__ import annotations

import copy
import json

import pytest
import tables
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from experiments import cut_texts, used_texts
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.encoding import encode


def test_every_committed_result_reports_on_a_text_that_it_may() -> None:
    assert used_texts.faults() == []


def test_what_is_listed_as_burnt_or_untold_is_there() -> None:
    known = used_texts.texts()
    assert set(known["burnt"]) | set(known["untold"]) <= set(used_texts.paths())


def planted(fault: str) -> list[str]:
    """The faults of texts.json with one of a kind put into it."""
    known = copy.deepcopy(used_texts.texts())
    path, record = next((p, r) for p, field, r in used_texts.committed() if field == "measured_on")
    learnt = next(r for _, field, r in used_texts.committed() if field == "learnt_on")
    h, of_learning = (r["text_hash"][: used_texts.DIGITS] for r in (record, learnt))

    def forget(h: str, *roles: str) -> None:
        for role in roles:
            known[role] = {name: [x for x in hashes if x != h] for name, hashes in known[role].items()}

    report = known["report"]["report-c4.txt"]["text_hashes"]
    if fault == "reports on a text that was used":
        known["burnt"].remove(path)
    elif fault == "a text without a role":
        forget(h, "fit", "choose")
    elif fault == "records no text":
        known["untold"].pop()
    elif fault == "records a text and is listed as one that does not":
        known["untold"].append(path)
    elif fault == "burnt without a text that was used":
        known["burnt"].append(known["untold"][0])
    elif fault == "a default chosen on a text to report on":
        known["defaults"][0]["chosen_on"].append("report-c4.txt")
    elif fault == "learnt from a text that is not to fit on":
        forget(of_learning, "fit")
        known["choose"]["another"] = [of_learning]
    elif fault == "learnt from a text to report on":
        forget(of_learning, "fit", "choose")
        report.append(of_learning)
    elif fault == "the windows of another text among those to report on":
        forget(h, "fit", "choose")
        report.append(h)
    else:
        report.append(h)
    return used_texts.faults(known)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("reports on a text that was used", "report on another"),
        ("a text without a role", "give it a role"),
        ("records no text", "measure it again"),
        ("records a text and is listed as one that does not", "take it off the list"),
        ("burnt without a text that was used", "take it off the list"),
        ("a default chosen on a text to report on", "was chosen on"),
        ("learnt from a text that is not to fit on", "list it there"),
        ("learnt from a text to report on", "list it there"),
        ("the windows of another text among those to report on", "its own role"),
        ("a text that was used among those to report on", "was used to fit"),
    ],
)
def test_planted_fault_a_text_that_may_not_report_is_seen(fault: str, seen: str) -> None:
    assert any(seen in line for line in planted(fault))


def test_a_line_that_shows_a_text_records_it() -> None:
    line = "gpt2, float32 on cpu; 128 tokens of my text.txt (all, 0aca8a746826), context 64, no BOS"
    found = list(used_texts._records({"measured on": {"letters": line}, "learnt on": [line]}))
    record = {"text": "my text.txt", "split": "all", "text_hash": "0aca8a746826"}
    assert found == [("letters", record), ("learnt_on", record)]


def test_make_tables_refuses_a_report_on_a_burnt_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tables.refuse_burnt()
    monkeypatch.setattr(used_texts, "texts", lambda: used_texts_without_marks)
    used_texts_without_marks = json.loads(used_texts.FILE.read_text(encoding="utf-8")) | {"burnt": []}
    with pytest.raises(SystemExit, match="report on another"):
        tables.refuse_burnt()


def test_a_cut_is_the_whole_documents_of_the_last_fifth() -> None:
    assert cut_texts.last(["a" * 8, "b", "c"]) == ["b", "c"]
    assert cut_texts.last(["a" * 7, "b" * 2, "c"]) == ["c"]


def test_a_text_that_was_read_is_refused_unless_it_was_reported_on(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(list(tokenizer.get_vocab())[:40] * 4)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    assert ids.numel() >= 64
    record = encode(lp.TokenBatch(ids, text="read", split="all", bos=False).measured_on(reader))
    record["model"]["name"] = "smollm2-135m"
    monkeypatch.setattr(cut_texts, "committed", lambda: (("read.json", "measured_on", record),))
    loaded = lp.wrap(reader, tokenizer)
    with pytest.raises(LyapunovPruneError):
        cut_texts.require_unread(loaded, "cut", text, [])
    cut_texts.require_unread(loaded, "cut", text, [record["text_hash"][: used_texts.DIGITS]])
