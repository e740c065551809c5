"""Figures and the page: every result has its picture, from files alone, with no network."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers import as_batch, example, make_tiny, moe, words_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from markupsafe import escape
from transformers import PreTrainedModel

from experiments.compressions import CompressionRow, CompressionTable, compressions_figure
from lyapunov_prune import LyapunovPruneError, check_bounds, compress, heal, perplexity, rank_layers, remove_layers
from lyapunov_prune.bounds import check_grid, check_written
from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.report import BoundsReport, Violation
from lyapunov_prune.compression.report import CompressedMatrix, CompressionReport
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.healing.report import Healing, HeldOut
from lyapunov_prune.healing.rounds import Round, Stretch
from lyapunov_prune.predictions import skip_divergence
from lyapunov_prune.predictions.divergence import SkipDivergence, sublayer_divergence
from lyapunov_prune.profiles import sublayer_influence
from lyapunov_prune.profiles.profile import LayerProfile, profile_layers
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking import angular_distance, greedy_removal
from lyapunov_prune.ranking.oracle import GreedyRemoval, GreedyStep
from lyapunov_prune.report.bounds import bounds_figure, ratios_figure
from lyapunov_prune.report.compression import compression_figure
from lyapunov_prune.report.drawing import COLOURS
from lyapunov_prune.report.healing import healing_figure
from lyapunov_prune.report.page import SECTIONS, load_result, write_report
from lyapunov_prune.report.predictions import divergence_figure
from lyapunov_prune.report.ranking import oracle_figure
from lyapunov_prune.results.result import LINES, ROWS

pytestmark = pytest.mark.xdist_group("report")  # one process makes `run`, not each

# What ends and what begins the MLP where it is not down, gate and up.
MADE_UP = {
    kind: example(kind, itertools.cycle([0.5]))
    for kind in (SkipDivergence, GreedyRemoval, Healing, CompressionReport, CompressionTable)
}
# Each example is a drawn figure: shrinking a failure would take minutes.
few = settings(max_examples=5, phases=(Phase.explicit, Phase.reuse, Phase.generate))
MAYBE = st.floats(1e-9, 1e3) | st.sampled_from([0.0, float("nan")])


MEASURES = ("variance", "kl", "reverse_kl", "flipped")
LOST = {"before": 30.0, "after": 15.0, "teacher": 10.0}


def points_of(svg: str, colour: str) -> int:
    """Markers filled with the colour, caps of error bars among them."""
    return len(re.findall(rf"<use [^>]*style=\"fill: {colour.lower()}", svg))


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
    check_grid(llama, ids[:1], sparsities=(0.5,), ranks=(None, 8), cache_radii=(0.0,)).save(folder / "bounds.json")
    angular_distance(llama, ids).save(folder / "angular.json")
    profile.influence.save(folder / "influence.json")
    sublayer_influence(llama, ids).save(folder / "sublayers.json")
    skip_divergence(llama, ids).save(folder / "divergence.json")
    sublayer_divergence(llama, ids, "mlp").save(folder / "sublayer-divergence.json")
    ranking = rank_layers(None, profile.influence, criterion="bi")
    greedy_removal(llama, ids, 2).save(folder / "oracle.json")
    compress(llama, ids, method="sparsegpt", sparsity=0.5).report.save(folder / "compression.json")
    other = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    healed = heal(remove_layers(llama, plans["bi"][1]), llama, ids.repeat(3, 1), steps=3, evaluation=other)
    healed.report.save(folder / "healing.json")
    write_report(folder)
    return folder


def test_every_answer_is_short_and_says_more_than_a_table(run: Path) -> None:
    read = [section.kind.load(path) for section in SECTIONS for path in section.paths(run)]
    assert len(read) >= 10
    for result in read:
        lines = result.answer()
        assert 0 < len(lines) <= LINES
        assert all(line.strip() and line.isprintable() for line in lines)
        assert len(result.brief()) <= ROWS
        assert "nan" not in " ".join(lines).split()
        assert len(repr(result)) < 8000


def test_the_page_opens_with_an_answer_and_explains_a_word_once(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    card = page[page.index('<section class="card">') : page.index("</section>")]
    assert all(escape(line) in card for line in Healing.load(run / "healing.json").answer())
    assert page.index('class="card"') < page.index("Contraction and Block Influence</h2>")
    words = re.findall("<dfn>(.*?)</dfn>", page)
    assert {"dense", "perplexity", "ρ"} <= set(words)
    assert len(words) == len(set(words))


def test_a_result_plots_what_the_page_draws(run: Path, tmp_path: Path) -> None:
    profile = LayerProfile.load(run / "profile.json")
    figures = profile.plot()
    assert list(figures) == ["contraction", "influence"]
    assert figures["influence"] == (run / "figures" / "influence.svg").read_text(encoding="utf-8")
    assert figures._repr_html_().count("<svg") == 2
    assert "<svg" not in repr(figures)
    assert [path.name for path in figures.save(tmp_path)] == ["contraction.svg", "influence.svg"]
    assert list(profile.contraction.plot()) == ["contraction"]
    with pytest.raises(LyapunovPruneError, match="PruningPlan"):
        PruningPlan.load(run / "plan-bi.json").plot()


def test_every_figure_is_drawn_as_svg_with_labelled_axes(run: Path) -> None:
    labels = {
        "contraction": ["contraction factor ρ", "layer"],
        "influence": ["Block Influence", "layer"],
        "influence-alone": ["Block Influence", "layer"],
        "ranking": ["rho", "bi", "blend", "layer"],
        "bounds": ["worst error / bound", "self_attn.q_proj", "mlp.down_proj", "layer"],
        "angular": ["1 − cos, ends of the run", "4 in a row", "first layer of the run"],
        "sublayers": ["Block Influence, 1 − cos", "attention", "MLP", "layer"],
        "divergence": ["nats a token", "KL(dense ‖", "the estimate", "tokens flipped, %", "layer"],
        "sublayer-divergence": ["nats a token", "KL(dense ‖ without its mlp)", "tokens flipped, %", "layer"],
        "oracle": ["perplexity", "dense", "oracle", "layers removed"],
        "compression": ["sparsity", "relative error", "weights", "outputs", "layer"],
        "healing": ["validation perplexity", "kept", "distillation loss", "step", "mean of 1", "→"],
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
            assert tag not in {"link", "img", "iframe"}
            assert tag != "script" or "src" not in dict(attrs)
            self.found += [v or "" for k, v in attrs if k in {"src", "href"}]

    links = Links()
    links.feed(page)
    assert page.count("<svg") == 12
    assert "url(http" not in page
    assert not [link for link in links.found if "//" in link]


def test_the_page_says_what_was_measured_on_what(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert re.search(r"float32 on cpu; 72 tokens of token ids", page)
    assert "95 %" in page
    assert "84 checks" in page
    assert ">mlp.down_proj</td>" in page  # a line a component before the line a matrix


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


def test_the_errors_of_a_checkpoint_are_drawn_by_their_ratios(
    llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path
) -> None:
    report = check_written(llama, compress(llama, method="rtn", bits=4).model, ids[:1])
    assert report.distribution is not None
    svg = ratios_figure(report.distribution)
    assert {"error / bound", "inputs"} <= set(words_of(svg))
    assert svg.count('id="patch_') >= len(report.distribution.counts)
    report.save(tmp_path / "bounds.json")
    page = write_report(tmp_path).read_text()
    assert svg in page
    assert "quantile_99" in page


def test_planted_fault_a_violation_is_drawn_and_told(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    report = check_bounds(llama, ids)
    check = BoundCheck("sparse_activation_bound", report.names[9], 1, error=2.0, bound=1.0, margin=0.0, inputs=1)
    wrong = replace(report, violations=(Violation(report.settings[0], check),))
    assert words_of(bounds_figure(wrong)).count("violation") == 1
    wrong.save(tmp_path / "bounds.json")
    assert f"is VIOLATED by {report.names[9]}" in write_report(tmp_path).read_text()
    assert BoundsReport.load(tmp_path / "bounds.json").violations == wrong.violations


def test_experts_are_drawn_with_the_matrices_of_their_layer(ids: torch.Tensor) -> None:
    model = moe("mixtral")
    report = check_bounds(model, ids[:1])
    assert not report.unseen
    drawn = [text for text in words_of(bounds_figure(report)) if re.fullmatch(r"\d?\.\d\d", text)]
    assert len(drawn) == len(set(zip(report.components, report.layers, strict=True)))


def test_an_evaluation_alone_makes_a_page(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    found = perplexity(llama, ids)
    evaluation = Evaluation((found,), (0.0,), None)
    assert evaluation.measured_on == (found.measured_on,)
    evaluation.save(tmp_path / "eval.json")
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


def test_a_checkpoint_alone_and_within_a_run_has_its_page(run: Path, tmp_path: Path) -> None:
    for name in ("compression.json", "healing.json"):
        (tmp_path / "a<b").mkdir(exist_ok=True)
        (tmp_path / "a<b" / name).write_text((run / name).read_text())
    (tmp_path / "a<b" / "config.json").write_text("{}")
    alone = write_report(tmp_path / "a<b").read_text()
    assert "<h2>Compression</h2>" in alone
    assert "<h2>Healing</h2>" in alone
    above = write_report(tmp_path).read_text()
    assert "<h2>Compression: a&lt;b/</h2>" in above
    assert "<h2>Healing: a&lt;b/</h2>" in above
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"compression-a<b.svg", "healing-a<b.svg"}


@few
@given(arrays(np.float64, (4, 5), elements=MAYBE))
def test_divergences_draw_one_point_for_each_number(rows: np.ndarray) -> None:
    picture = divergence_figure(replace(MADE_UP[SkipDivergence], **dict(zip(MEASURES, rows, strict=True))))
    assert {"nats a token", "tokens flipped, %"} <= set(words_of(picture))
    shown = {"rho": (rows[1] > 0).sum(), "bi": (rows[0] > 0).sum(), "blend": np.isfinite(rows[3]).sum()}
    in_the_legend = {"rho": np.isfinite(rows[1]).any(), "bi": np.isfinite(rows[0]).any(), "blend": False}
    for name, count in shown.items():
        assert points_of(picture, COLOURS[name]) == count + int(in_the_legend[name]), name


@few
@given(arrays(np.float64, (7, 3), elements=st.floats(0.1, 5) | st.just(float("nan"))))
def test_every_step_of_a_search_names_its_layer(losses: np.ndarray) -> None:
    """Layers have numbers that no axis has; a step without a number is left out."""
    steps = tuple(GreedyStep(1003 + 7 * i, windows, 1.0, 1) for i, windows in enumerate(losses[1:]))
    on = MADE_UP[GreedyRemoval].measured_on
    on = replace(on, model=replace(on.model, num_layers=1100))
    search = replace(MADE_UP[GreedyRemoval], dense=losses[0], steps=steps, measured_on=on)
    words = words_of(oracle_figure(search))
    assert [w for w in words if re.fullmatch(r"10(?!00)\d\d", w)] == [
        str(step.layer) for step in steps if np.isfinite(step.windows).all()
    ]
    assert {"perplexity", MADE_UP[GreedyRemoval].criterion.strip()} <= {*words}


def healing(losses: np.ndarray, judged: list[float], held_out: HeldOut | None = None) -> Healing:
    """Judged 2.5 before, then after each round of as many steps, the first of them a trial."""
    steps = len(losses) // len(judged)
    rounds = tuple(
        Round(Stretch("start" if k == 0 else "here", k == 0, 1e-3, steps), np.full(4, value))
        for k, value in enumerate(judged)
    )
    given = {"losses": losses, "rounds": rounds, "judged": np.full(4, 2.5), "held_out": held_out}
    return replace(MADE_UP[Healing], decision=None, **given)


def test_healing_says_what_came_back() -> None:
    made = MADE_UP[Healing].held_out
    held_out = replace(made, **{name: replace(made.before, nll=np.log(x)) for name, x in LOST.items()})
    losses = np.array([2.0, np.nan, *np.linspace(1, 0, 22)])
    words = words_of(healing_figure(healing(losses, [2.4, 2.0, np.inf, 2.1], held_out)))
    assert {"75 % recovered: perplexity 30 → 15, dense 10", "mean of 3", "round", "trial of a rate", "kept"} <= {*words}
    nothing = healing(losses, [2.6, 2.7], replace(held_out, before=held_out.teacher))
    assert "perplexity 10 → 15, dense 10" in words_of(healing_figure(nothing))  # NaN: the removal cost nothing
    without = words_of(healing_figure(healing(np.full(3, np.nan), [np.inf, np.nan, np.inf])))
    assert "distillation loss, nats a token" in without
    assert not any("dense" in word for word in without)


@few
@given(st.lists(st.tuples(MAYBE, MAYBE | st.none()), min_size=6, max_size=6))
def test_a_compression_draws_every_matrix(errors: list[tuple[float, float | None]]) -> None:
    """Three matrices in each of layers 0 and 3 of five."""
    matrices = tuple(
        CompressedMatrix(f"m{i}", 3 * (i // 3), "c", 4, 4, 3.0, 0.0, None, 3, weight, output)
        for i, (weight, output) in enumerate(errors)
    )
    made = MADE_UP[CompressionReport]
    allocation = replace(made.allocation, unit="bits", model=replace(made.allocation.model, num_layers=5))
    picture = compression_figure(replace(made, matrices=matrices, allocation=allocation))
    words = words_of(picture)
    assert {"bits a weight", "relative error", "weights, ‖W − Ŵ‖ / ‖W‖", "4"} <= {*words}  # to the last layer
    assert ("outputs, ‖(W − Ŵ) X‖ / ‖W X‖" in words) == any(e is not None and e == e for _, e in errors)


def test_amounts_are_told_apart_and_what_all_rows_share_is_not_repeated() -> None:
    nan = float("nan")

    def rows(*names: tuple[str, str, str, float]) -> CompressionTable:
        made = [CompressionRow(m, s, unit, amount, 0.5, 2.0, 1.0, 0.9, 1.2) for m, s, unit, amount in names]
        made[0] = replace(made[0], degradation=nan, low=nan, high=nan)
        made[-1] = replace(made[-1], degradation=1.0, low=1.0 + 2e-16, high=1.0)  # rounded
        return replace(MADE_UP[CompressionTable], rows=tuple(made), dense=17.31)

    methods = compressions_figure(
        rows(*((m, "uniform", "sparsity", 0.55) for m in ("svd", "wanda")), ("rtn", "uniform", "bits", 4.0))
    )
    assert {"svd, 55 %", "wanda, 55 %", "rtn, 4 bits", "perplexity / dense (17.3)"} <= set(words_of(methods))
    schedules = compressions_figure(rows(*(("wanda", s, "sparsity", a) for a in (0.5, 0.7) for s in ("atp", "owl"))))
    assert {"atp, 50 %", "owl, 50 %", "atp, 70 %", "owl, 70 %"} <= set(words_of(schedules))
    first, second = list(COLOURS.values())[:2]
    assert (points_of(schedules, first), points_of(schedules, second)) == (3, 6)  # with two caps each; one is NaN
    both = compressions_figure(rows(("wanda", "owl", "rank", 4.0), ("svd", "atp", "rank", 4.0)))
    assert {"wanda, owl, rank 4", "svd, atp, rank 4"} <= set(words_of(both))
    assert "70 %" in words_of(compressions_figure(rows(("wanda", "owl", "sparsity", 0.7))))


@pytest.mark.parametrize("content", ["{}", "[]", '{"kind": "Unknown"}', "no json"])
def test_a_file_without_a_result_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(LyapunovPruneError, match=r"x\.json holds no result"):
        load_result(tmp_path / "x.json")
