"""Figures and the page: every result has its picture, from files alone, with no network."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conftest import make_tiny
from test_approx import moe
from transformers import PreTrainedModel

from lyapunov_prune import (
    LyapunovPruneError,
    activation_statistics,
    check_bounds,
    check_grid,
    measure_speed,
    perplexity,
    rank_layers,
    sublayer_jacobians,
)
from lyapunov_prune.bounds import BoundCheck
from lyapunov_prune.bounds_report import BoundsReport, Violation
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.evaluation.removal import evaluate_removals
from lyapunov_prune.profile import profile_layers
from lyapunov_prune.report.internals import activation_figure, bounds_figure, jacobian_figure
from lyapunov_prune.report.page import write_report
from lyapunov_prune.text import as_batch

# What ends and what begins the MLP where it is not down, gate and up.
MLPS = {
    "gpt2": ("mlp.c_proj", "mlp.c_fc"),
    "gpt_neox": ("mlp.dense_4h_to_h", "mlp.dense_h_to_4h"),
    "opt": ("fc2", "fc1"),
    "phi3": ("mlp.down_proj", "mlp.gate_up_proj"),
}


def words_of(svg: str) -> list[str]:
    return [text.strip() for text in ElementTree.fromstring(svg).itertext() if text.strip()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, llama: PreTrainedModel) -> Path:
    folder = tmp_path_factory.mktemp("run")
    ids = torch.randint(97, (3, 24), generator=torch.Generator().manual_seed(0))
    profile = profile_layers(llama, as_batch(llama, ids), seeds=(0, 1))
    profile.save(folder / "profile.json")
    plans = {}
    for criterion in ("rho", "bi", "blend"):
        ranking = rank_layers(profile.contraction, profile.influence, criterion=criterion)
        plans[criterion] = [ranking.plan(1), ranking.plan(3)]
        ranking.plan(2).save(folder / f"plan-{criterion}.json")
    evaluate_removals(llama, plans, ids).save(folder / "removal.json")
    measure_speed({"dense": llama}, prompt=4, steps=2, repeats=1).save(folder / "speed.json")
    activation_statistics(llama, ids).save(folder / "activations.json")
    sublayer_jacobians(llama, ids[:, :4], steps=3, probes=1).save(folder / "jacobian.json")
    check_grid(llama, ids[:1], sparsities=(0.5,), ranks=(None, 8), cache_radii=(0.0,)).save(folder / "bounds.json")
    write_report(folder)
    return folder


def test_every_figure_is_drawn_as_svg_with_labelled_axes(run: Path) -> None:
    labels = {
        "contraction": ["contraction factor ρ", "layer"],
        "influence": ["Block Influence", "layer"],
        "ranking": ["rho", "bi", "blend", "layer"],
        "perplexity": ["perplexity", "layers removed"],
        "speed": ["tok/s", "dense"],
        "activations": [
            *("mlp.down_proj", "mlp.gate_proj, mlp.up_proj", "every token weighed alike", "layer"),
            *("effective rank of y / width", "excess kurtosis of x", "sparsity of x, %"),
        ],
        "jacobian": ["stretch of an error", "attention, ‖J‖ from below", "MLP, ‖J‖_F/√n", "layer"],
        "bounds": ["worst error / bound", "self_attn.q_proj", "mlp.down_proj", "layer"],
    }
    assert {path.stem for path in (run / "figures").glob("*.svg")} == set(labels)
    for name, words in labels.items():
        text = " ".join(ElementTree.parse(run / "figures" / f"{name}.svg").getroot().itertext())
        assert all(word in text for word in words), name


def test_the_page_needs_nothing_else(run: Path) -> None:
    page = (run / "report.html").read_text()

    class Links(HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in {"script", "link", "img", "iframe"}
            self.found += [v or "" for k, v in attrs if k in {"src", "href"}]

    links = Links()
    links.feed(page)
    assert page.count("<svg") == 8
    assert "url(http" not in page
    assert not [link for link in links.found if "//" in link]


def test_the_page_says_what_was_measured_on_what(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert re.search(r"float32 on cpu; 72 tokens of token ids", page)
    assert "95 %" in page
    assert "an estimate from below and no bound" in page
    assert "84 checks" in page
    assert "<td>mlp.down_proj</td>" in page  # a line a component before the line a matrix


def test_the_same_results_draw_the_same_figures(run: Path) -> None:
    before = {path: path.read_bytes() for path in (run / "figures").iterdir()}
    write_report(run)
    assert {path: path.read_bytes() for path in (run / "figures").iterdir()} == before


def test_the_worst_of_all_settings_and_heads_is_in_its_cell(ids: torch.Tensor) -> None:
    report = check_grid(make_tiny("gpt2"), ids[:1], sparsities=(0.5,), ranks=(None, 6), cache_radii=(0.0,))
    frame = report.to_frame().groupby(["component", "layer"]).worst_ratio.max()
    drawn = [text for text in words_of(bounds_figure(report)) if re.fullmatch(r"\d?\.\d\d", text)]
    components = list(dict.fromkeys(report.components))
    assert drawn == [f"{frame[c, layer]:.2f}".removeprefix("0") for c in components for layer in range(6)]
    assert "violation" not in words_of(bounds_figure(report))


def test_planted_fault_a_violation_is_drawn_and_told(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    report = check_bounds(llama, ids)
    check = BoundCheck("sparse_activation_bound", report.names[9], 1, error=2.0, bound=1.0, margin=0.0, inputs=1)
    wrong = replace(report, violations=(Violation(report.settings[0], check),))
    assert words_of(bounds_figure(wrong)).count("violation") == 1
    wrong.save(tmp_path / "bounds.json")
    assert f"is VIOLATED by {report.names[9]}" in write_report(tmp_path).read_text()
    assert BoundsReport.load(tmp_path / "bounds.json").violations == wrong.violations


def test_every_family_has_its_figures(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    texts = words_of(activation_figure(activation_statistics(model, ids[:1])))
    ends, begins = MLPS.get(family.partition("-")[0], ("mlp.down_proj", "mlp.gate_proj, mlp.up_proj"))
    assert {ends, begins} <= set(texts)
    assert not any("attn" in text or "attention" in text for text in texts)
    assert "stretch of an error" in words_of(jacobian_figure(sublayer_jacobians(model, ids[:1, :4], steps=2, probes=1)))


def test_experts_that_were_not_seen_leave_gaps(ids: torch.Tensor) -> None:
    model = moe("mixtral")
    assert "effective rank of y / width" in words_of(activation_figure(activation_statistics(model, ids[:1])))
    report = check_bounds(model, ids[:1])
    seen = {(c, n) for c, n, r in zip(report.components, report.layers, report.ratio[0], strict=True) if r == r}
    drawn = [text for text in words_of(bounds_figure(report)) if re.fullmatch(r"\d?\.\d\d", text)]
    assert len(drawn) == len(seen) < len(set(zip(report.components, report.layers, strict=True)))


def test_an_evaluation_alone_makes_a_page(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    Evaluation((perplexity(llama, ids),), (0.0,), None).save(tmp_path / "eval.json")
    assert "perplexity" in write_report(tmp_path).read_text()


def test_one_window_draws_without_intervals(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    profile_layers(llama, as_batch(llama, ids[:1]), seeds=(0,)).save(tmp_path / "profile.json")
    assert write_report(tmp_path).is_file()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="holds no results"):
        write_report(tmp_path)


def test_names_are_escaped(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "<b>").mkdir()
    Evaluation((perplexity(llama, ids),), (0.0,), None).save(tmp_path / "<b>" / "eval.json")
    assert "<b>" not in write_report(tmp_path / "<b>").read_text()
