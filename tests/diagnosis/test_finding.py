"""Findings are kept in a file and tell their share and their cause."""

from lyapunov_prune.diagnosis.finding import Diagnosis, Finding


def test_a_diagnosis_comes_back_as_it_was_saved(tmp_path):
    said = "`norm.weight` is that of DENSE plus 1."
    found = Finding("shift", ("norm.weight",), said, "certain", "Gemma", "fetch", 0.5)
    bare = Finding("tokenizer", (), "The ids differ.", "likely")
    assert Finding("missing", tuple("abcde"), "", "certain").places() == "a, b, c and 2 more"
    kept = Diagnosis("file.gguf", (found, bare))
    assert Diagnosis.load(kept.save(tmp_path / "diagnosis.json")) == kept
    assert list(kept.to_frame()["kind"]) == ["shift", "tokenizer"]
    first, second = kept.answer()
    assert first.startswith(said)
    assert "50%" in first
    assert "Gemma" in first
    assert second == "The ids differ (likely)."
