"""Figures and the page: every result has its picture, from files alone, with no network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, measure_speed, perplexity, rank_layers
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.evaluation.removal import evaluate_removals
from lyapunov_prune.profile import profile_layers
from lyapunov_prune.report.page import write_report
from lyapunov_prune.text import as_batch


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
    write_report(folder)
    return folder


def test_every_figure_is_drawn_as_svg_with_labelled_axes(run: Path) -> None:
    labels = {
        "contraction": ["contraction factor ρ", "layer"],
        "influence": ["Block Influence", "layer"],
        "ranking": ["rho", "bi", "blend", "layer"],
        "perplexity": ["perplexity", "layers removed"],
        "speed": ["tok/s", "dense"],
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
    assert page.count("<svg") == 5
    assert "url(http" not in page
    assert not [link for link in links.found if "//" in link]


def test_the_page_says_what_was_measured_on_what(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert re.search(r"float32 on cpu; 72 tokens of token ids", page)
    assert "95 %" in page


def test_the_same_results_draw_the_same_figures(run: Path) -> None:
    before = {path: path.read_bytes() for path in (run / "figures").iterdir()}
    write_report(run)
    assert {path: path.read_bytes() for path in (run / "figures").iterdir()} == before


def test_an_evaluation_alone_makes_a_page(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    Evaluation((perplexity(llama, ids),), None).save(tmp_path / "eval.json")
    assert "perplexity" in write_report(tmp_path).read_text()


def test_one_window_draws_without_intervals(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    profile_layers(llama, as_batch(llama, ids[:1]), seeds=(0,)).save(tmp_path / "profile.json")
    assert write_report(tmp_path).is_file()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="holds no results"):
        write_report(tmp_path)


def test_names_are_escaped(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "<b>").mkdir()
    Evaluation((perplexity(llama, ids),), None).save(tmp_path / "<b>" / "eval.json")
    assert "<b>" not in write_report(tmp_path / "<b>").read_text()
