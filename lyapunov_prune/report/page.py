"""One self-contained HTML page about a run: it reads the run's JSON files and needs no network."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lyapunov_prune.bounds.report import BoundsReport
from lyapunov_prune.compression.report import REPORT as COMPRESSION
from lyapunov_prune.compression.report import CompressionReport
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.evaluation.retrieval import RetrievalScores
from lyapunov_prune.evaluation.speed import Speed
from lyapunov_prune.healing.heal import REPORT as HEALING
from lyapunov_prune.healing.heal import Healing
from lyapunov_prune.joint.result import REPORT as JOINT
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.models.folder import first_line
from lyapunov_prune.predictions.attention_paths import AttentionPaths
from lyapunov_prune.predictions.choices import ChoiceComparison
from lyapunov_prune.predictions.divergence import SkipDivergence, SublayerDivergence
from lyapunov_prune.predictions.generation import GenerationDivergence
from lyapunov_prune.predictions.hierarchy import HierarchyProbe
from lyapunov_prune.predictions.history import HistoryDivergence
from lyapunov_prune.predictions.verdict import Verdict
from lyapunov_prune.profiles.activations import ActivationStatistics
from lyapunov_prune.profiles.influence import InfluenceProfile
from lyapunov_prune.profiles.jacobian import JacobianNorms
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.profiles.sublayer_influence import SublayerInfluence
from lyapunov_prune.pruning.curve import RemovalCurve
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.ranking.angular import AngularDistance
from lyapunov_prune.ranking.budget import BudgetedRemoval
from lyapunov_prune.ranking.oracle import GreedyRemoval
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.report.bounds import bounds_figures
from lyapunov_prune.report.compression import compression_figure
from lyapunov_prune.report.evaluation import retrieval_figure, speed_figure, tasks_figure
from lyapunov_prune.report.healing import healing_figure
from lyapunov_prune.report.joint import importance_figure, joint_figure
from lyapunov_prune.report.predictions import (
    choices_figures,
    divergence_figure,
    generation_figure,
    hierarchy_figure,
    history_figure,
    kl_figure,
    paths_figure,
    verdict_figure,
)
from lyapunov_prune.report.profiles import (
    activation_figure,
    contraction_figure,
    influence_figure,
    jacobian_figure,
    sublayer_figure,
)
from lyapunov_prune.report.questions import POLICY, SCRIPT, questions
from lyapunov_prune.report.ranking import (
    angular_figure,
    best_figure,
    budget_figure,
    oracle_figure,
    perplexity_figure,
    ranking_figure,
    recovery_figure,
)
from lyapunov_prune.report.sensitivity import sensitivity_figures
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import Result
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th { cursor: pointer; } th[data-order=rising]::after { content: " ↑"; } th[data-order=falling]::after { content: " ↓"; }
#strip span { display: inline-block; min-width: 1.7rem; margin: 1px; text-align: center; border: 1px solid #bbb;
  font-size: .8rem; } #strip .gone { background: #d55e00; border-color: #d55e00; color: #fff; }
#ask dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } #ask dd { margin: 0; }
#ask label { margin-right: 1.5rem; } dt { color: #666; } code { background: #f3f3f3; padding: .15rem .4rem; }
p.on { color: #666; font-size: .85rem; white-space: pre-line; } details { margin: .6rem 0; }
"""

_RETRIEVAL = (
    "A text is the mean of its final hidden states, and the documents of a query are those at the smallest angle. "
    "The first ten cannot change while the similarities of a query shift by less than the margin below the tenth; "
    "where they shift by more, nothing is promised and much may stay. A base model is no embedding model: compare "
    "the models, not the level."
)


@dataclass(frozen=True)
class _Section:
    """`file` holds a `kind`; `part` takes what is shown from it, None for nothing; `draw` gives names and SVG texts.

    With `in_folders` folders within the run are looked through for it too: it stands beside weights, or is of a command
    that leaves the run's own file alone.
    """

    file: str
    kind: type[Result]
    title: str
    words: str
    draw: Callable[[Any], dict[str, str]]
    in_folders: bool = False
    part: Callable[[Any], Result | None] = lambda r: r

    def paths(self, run: Path) -> list[Path]:
        below = sorted(run.glob(f"*/{self.file}")) if self.in_folders else []
        return [path for path in (run / self.file, *below) if path.is_file()]


_SECTIONS = (
    _Section(
        "profile.json",
        LayerProfile,
        "Contraction and Block Influence",
        "ρ is the factor by which a layer changes the relative energy of an error that reaches it: below one "
        "the layer absorbs it. Bars are 95 % bootstrap intervals over windows and seeds. Block Influence is "
        "how far a layer turns the hidden state. Both are measurements on the text named below, not bounds.",
        lambda r: {
            "contraction": contraction_figure(r.contraction),
            "influence": influence_figure(r.influence),
        },
        in_folders=True,
    ),
    _Section(
        "influence.json",
        InfluenceProfile,
        "Block Influence",
        "How far a layer turns the hidden state: the least goes first by criterion bi. Bars are standard errors over "
        "windows. A measurement on the text named below.",
        lambda r: {"influence-alone": influence_figure(r)},
    ),
    _Section(
        "activations.json",
        ActivationStatistics,
        "Activations of the MLP",
        "Three properties that the paper associates with early layers that cannot be compressed: the effective "
        "rank of what leaves a matrix, the tails of what enters it, and how much of what enters it is nearly "
        "zero. Attention sinks, tokens of enormous norm, can be all of the covariance: on the "
        "broken line all tokens weigh the same. Correlations, and no explanation by themselves.",
        lambda r: {"activations": activation_figure(r)},
    ),
    _Section(
        "jacobian.json",
        JacobianNorms,
        "Jacobians of the branches",
        "By how much attention and MLP, each with its norm, stretch a small change of the residual stream that "
        "enters them: the worst direction found, an estimate from below and no bound, and the root mean square "
        "over random directions. Where the worst is above one, the branch alone cannot promise that an error "
        "shrinks.",
        lambda r: {"jacobian": jacobian_figure(r)},
    ),
    _Section(
        "sublayers.json",
        SublayerInfluence,
        "Block Influence of attention and MLP",
        "How far each branch by itself turns the residual stream; the branch of least influence goes first. Bars "
        "are standard errors over windows. A measurement on the text named below.",
        lambda r: {"sublayers": sublayer_figure(r)},
    ),
    _Section(
        "angular.json",
        AngularDistance,
        "Runs of layers",
        "How far layers in a row turn the hidden state, all together: the run whose ends are nearest is removed as one "
        "by criterion angular. Of single layers it is Block Influence. A measurement on the text named below.",
        lambda r: {"angular": angular_figure(r)},
    ),
    _Section(
        "divergence.json",
        SkipDivergence,
        "Prediction without a layer",
        "Each layer skipped by itself: how far the probabilities of the next token move, as Kullback–Leibler "
        "divergence from the dense model's, and its estimate by the variance of the change of the logits, which is "
        "good only where that change is small; the criterion kl ranks by the estimate. Below, how often the likeliest "
        "token is another. A prediction that moves need not be a worse one, and layers skipped together may cost "
        "more than the sum.",
        lambda r: {"divergence": divergence_figure(r)},
    ),
    _Section(
        "sublayer-divergence.json",
        SublayerDivergence,
        "Prediction without the attention or the MLP of a layer",
        "The same with one kind of branch alone, which adds nothing to the residual stream: how far the probabilities "
        "of the next token move, and the estimate by which criterion kl ranks. Layers without such a branch have none.",
        lambda r: {"sublayer-divergence": divergence_figure(r)},
    ),
    _Section(
        "budget.json",
        BudgetedRemoval,
        "Layers within a budget of divergence",
        "The first layers of a ranking removed together, more and more of them, until the probabilities of the next "
        "token have moved further from the dense model's than the budget allows, on the text named below. The sum of "
        "what the layers cost alone predicts it and bounds nothing.",
        lambda r: {"budget": budget_figure(r)},
    ),
    _Section(
        "oracle.json",
        GreedyRemoval,
        "Greedy removal",
        "At each step every candidate was tried, and the one whose removal raises the perplexity least went; "
        "the number at a point is that layer. The perplexity is that of the text that chose the layers, so it "
        "flatters them: other text must judge. A greedy order need not hold the best set of layers.",
        lambda r: {"oracle": oracle_figure(r)},
    ),
    _Section(
        "best.json",
        BestRemoval,
        "The best of many choices",
        "Sets of layers that the cheap criteria propose, each checked by its loss on windows that no score has seen; "
        "then swaps of single layers from the best of them, taken when a paired test says that they pay. The windows "
        "that checked chose, so they flatter the chosen set: other text must judge. How often each layer is picked "
        "when the windows are drawn anew says how much hangs on them.",
        lambda r: {"best": best_figure(r)},
    ),
    _Section(
        "sensitivity.json",
        Sensitivity,
        "Sensitivity",
        "One thing changed at a time, and the perplexity on text that no score has seen. Bars are 95 % intervals of "
        "the ratio to the dense model, paired by window. Drift is 1 − CKA of the states that the head reads. "
        "Measurements on one text; a rank correlation over the layers of one model is a hint, no law.",
        sensitivity_figures,
    ),
    _Section(
        "bounds.json",
        BoundsReport,
        "Bounds",
        "Every matrix replaced by an approximation, and the error of every token held against the bound that a "
        "theorem sets it. At one the bound is attained; above, it would be violated. A check that holds speaks "
        "of the inputs it saw.",
        bounds_figures,
    ),
    _Section(
        "removal.json",
        RemovalCurve,
        "Perplexity after removal",
        "Layers physically removed, in the order of each criterion, on text that no score has seen. Bars are "
        "95 % intervals of the ratio to the dense model, paired by window.",
        lambda r: {"perplexity": perplexity_figure(r)},
    ),
    _Section(
        "recovery.json",
        RemovalCurve,
        "Cut, mended, healed",
        "The same layers removed: cut and nothing more; the gaps closed without training, by a linear map in the layer "
        "before each; and trained from there on what the dense model predicts. Maps and training saw the calibration "
        "half of the text, perplexity is of the other. Bars are 95 % intervals of the ratio to the dense model, paired "
        "by window.",
        lambda r: {"recovery": recovery_figure(r)},
    ),
    _Section(
        COMPRESSION,
        CompressionReport,
        "Compression",
        "How much was taken from each layer, and what its matrices lost, relative to what they held: points are "
        "matrices, lines the root mean square of a layer. The error of the outputs is measured on the calibration "
        "text that the method saw, where it collected the second moments of the inputs. Errors of single matrices do "
        "not say what the whole model has lost: evaluate it.",
        lambda r: {"compression": compression_figure(r)},
        in_folders=True,
    ),
    _Section(
        HEALING,
        Healing,
        "Healing",
        "The pruned model learns to predict what the dense one predicts, from one window a step, so the loss jumps "
        "with the text; the line is a running mean. A loss on the text learnt from shows progress, not success: "
        "the share recovered, of the perplexity that the removal cost, is measured on other text.",
        lambda r: {"healing": healing_figure(r)},
        in_folders=True,
    ),
    _Section(
        JOINT,
        JointRun,
        "Joint removal",
        "A map of the score after recovery over the numbers of attentions and of activations removed: lines of equal P "
        "through measured points, the pairs of the budget, and the chosen one; below it the prediction interval of "
        "every pair. The score at the end is of data that neither training nor choice has seen. Seconds are of the "
        "run that ended, those of points of all runs that it went on from.",
        lambda r: {"joint": joint_figure(r.map, r.decision)},
        in_folders=True,
    ),
    _Section(
        JOINT,
        JointRun,
        "Pairs of the budget",
        "What the map says of the best pairs, with its prediction interval, and whether a pair lies within twice the "
        "noise of the chosen one: among those the points do not tell which is best.",
        lambda r: {},
        in_folders=True,
        part=lambda r: r.decision,
    ),
    _Section(
        JOINT,
        JointRun,
        "Recovered points",
        "Each point learnt from the dense model for a few steps, from the weights of the point before it on its chain, "
        "and was scored on the selection slice. The distillation loss is of the one item of its step.",
        lambda r: {},
        in_folders=True,
        part=lambda r: r.points,
    ),
    _Section(
        JOINT,
        JointRun,
        "Importance within each type",
        "By layer; the smallest of a type goes first. The two types are on axes of their own, for they are not "
        "compared: how many of each go is read off the map.",
        lambda r: {"importance": importance_figure(r)},
        in_folders=True,
        part=lambda r: r.importance,
    ),
    _Section(
        "verdict.json",
        Verdict,
        "Verdict by kind of task",
        "Retrieval is decided by the final states, a choice by the few options, generation by the whole distribution, "
        "again at each token. Of each kind, on the items named below: how far what decides has moved, how far it may "
        "move before the decision can change, and how many decisions stayed. Where it moved further than it may, a "
        "decision may stay all the same. Other tasks of a kind may fare otherwise: measure your own.",
        lambda r: {"verdict": verdict_figure(r)},
    ),
    _Section(
        "hierarchy.json",
        HierarchyProbe,
        "Hidden state, logits, probabilities",
        "One layer at a time replaced inside the dense model's own context, at each step that it decodes: how far the "
        "state, the logits and the probabilities turn, beside their second-order estimates, and the divergence of the "
        "prediction beside its proven bounds. A bound that holds speaks of these steps.",
        lambda r: {"hierarchy": hierarchy_figure(r), "kl": kl_figure(r)},
    ),
    _Section(
        "generation.json",
        GenerationDivergence,
        "Generation",
        "Both models decode on their own from the same prompts. Once their texts differ they answer different "
        "questions, and similarity falls for that reason too.",
        lambda r: {"generation": generation_figure(r)},
    ),
    _Section(
        "sampled.json",
        GenerationDivergence,
        "Generation by draws",
        "The same prompts, each next token drawn from the model's own probabilities. One number decides for both "
        "models at each step, so two equal models write one text, and what differs is not luck.",
        lambda r: {"sampled": generation_figure(r)},
    ),
    _Section(
        "diverged-history.json",
        HistoryDivergence,
        "Direct error and diverged history",
        "The compressed model's predictions against the dense model's, where it reads the dense model's text and where "
        "it reads its own. The first is the compression's doing at each step; what the second adds comes back through "
        "the tokens that it generated, and is about another text once these differ. Broken lines are the estimates.",
        lambda r: {"history": history_figure(r)},
    ),
    _Section(
        "paths.json",
        AttentionPaths,
        "Paths of the error through attention",
        "What attention hands on is an average of values. It changes because the values change, or the weights that "
        "average them; norms relative to the dense model's output. Each model reads its own text: what comes from the "
        "prompt is the compression's doing, what comes from generated tokens also that these are others.",
        lambda r: {"paths": paths_figure(r)},
    ),
    _Section(
        "choices.json",
        ChoiceComparison,
        "Multiple choice",
        "A choice is made among the few tokens that begin the options, which together may hold little of the "
        "probability: that is why it can survive a compression that changes what the model writes. The certificate "
        "speaks of the first token among those of the options, in these items.",
        choices_figures,
    ),
    _Section(
        "letters.json",
        ChoiceComparison,
        "Multiple choice by letters",
        "The same items with their options listed and named by letters: one token decides. A model that takes one "
        "letter whatever is asked keeps its choice under any compression; how often the dense one does is said below.",
        lambda r: {f"letters-{name}": picture for name, picture in choices_figures(r).items()},
    ),
    _Section(
        "retrieval.json",
        RetrievalScores,
        "Retrieval with both models",
        _RETRIEVAL,
        lambda r: {"retrieval-both": retrieval_figure(r)},
    ),
    _Section(
        "eval.json",
        Evaluation,
        "Evaluation",
        "Perplexity over non-overlapping windows, every window on its own.",
        lambda r: {"speed": speed_figure(r.speed)} if r.speed else {},
    ),
    _Section(
        "eval.json",
        Evaluation,
        "Tasks",
        "Multiple choice asks which of a few given texts is likelier; generation has the model write, greedily. A "
        "model may keep the first and lose the second, so the share of answers that end in a cycle, and of 3-grams "
        "that are repeated, stand below the accuracies. Bars are 95 % intervals over items, each model on its own: "
        "Wilson's, of 3-grams 1.96 standard errors.",
        lambda r: {"tasks": tasks_figure(r)},
        part=lambda r: r.tasks,
    ),
    _Section(
        "eval.json",
        Evaluation,
        "Retrieval",
        _RETRIEVAL,
        lambda r: {"retrieval": retrieval_figure(r)},
        part=lambda r: r.retrieval,
    ),
    _Section(
        "speed.json",
        Speed,
        "Speed",
        "All models measured in turns in one run; medians.",
        lambda r: {"speed": speed_figure(r)},
    ),
)


def require_readable(run: Path, replaced: Collection[str] = ()) -> None:
    """Raise LyapunovPruneError for a file in `run` that `write_report` cannot read, but for those to be `replaced`."""
    kinds: dict[Path, type[Result]] = {path: section.kind for section in _SECTIONS for path in section.paths(run)}
    kinds |= dict.fromkeys(run.glob("plan*.json"), PruningPlan) | dict.fromkeys(run.glob(f"*/{PROVENANCE}"), Provenance)
    for path, kind in kinds.items():
        if path.relative_to(run).as_posix() not in replaced:
            kind.load(path)


def write_report(run: str | Path) -> Path:
    """Write `report.html` and `figures/*.svg` into the folder `run` from the results it holds.

    Raises LyapunovPruneError when the folder holds none.
    """
    run = Path(run)
    body: list[str] = []
    drawn: dict[str, str] = {}
    read: dict[Path, Any] = {}  # several sections draw one file
    plans = {path.stem.removeprefix("plan-"): PruningPlan.load(path) for path in sorted(run.glob("plan*.json"))}
    scored = {name: plan for name, plan in plans.items() if len(plan.scores)}
    for section in _SECTIONS:
        for path in section.paths(run):
            if path not in read:
                read[path] = section.kind.load(path)
            result = section.part(read[path])
            if result is None:
                continue
            title, ending = section.title, ""
            if path.parent != run:
                title, ending = f"{title}: {path.parent.name}/", f"-{path.parent.name}"
            with _showing(path):
                pictures = {f"{name}{ending}": picture for name, picture in section.draw(result).items()}
                body.append(_section(title, section.words, pictures, result))
            drawn |= pictures
            if section.kind in (LayerProfile, InfluenceProfile) and scored and "ranking" not in drawn:
                pictures = {"ranking": ranking_figure(scored)}
                drawn |= pictures
                words = "The number is a layer's rank: 1 would be removed first. Filled layers are removed by the plan."
                body.append(_section("Rankings and plans", words, pictures, *scored.values()))
    for path in sorted(run.glob(f"*/{PROVENANCE}")):
        provenance = Provenance.load(path)
        made = f"The {provenance.format} checkpoint {path.parent.name}/"
        words = f"{made} was written after these checks passed on its files."
        body.append(_section("Removal gate", words, {}, provenance.gate))
    if not body:
        raise LyapunovPruneError(f"{run} holds no results; give a folder that profile, demo or eval wrote")
    for name, svg in drawn.items():
        write_whole(run / "figures" / f"{name}.svg", svg)
    asked = questions(read.values())
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>lyapunov-prune: {html.escape(run.name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>lyapunov-prune: {html.escape(run.name)}</h1>{asked}{''.join(body)}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )
    return write_whole(run / "report.html", page)


@contextmanager
def _showing(path: Path) -> Iterator[None]:
    """Raises LyapunovPruneError where the parts of a result, each of its type, do not go together."""
    try:
        yield
    except LyapunovPruneError:
        raise
    except Exception as error:  # of whatever the file holds
        raise LyapunovPruneError(f"{path} cannot be shown ({first_line(error)}); make it again") from None


def _section(title: str, words: str, pictures: dict[str, str], *results: Result) -> str:
    parts = [f"<h2>{html.escape(title)}</h2><p>{html.escape(words)}</p>"]
    parts += [f"<figure>{svg}</figure>" for svg in pictures.values()]
    for result in results:
        if result.headline():
            parts.append(f'<p class="on">{html.escape(result.headline())}</p>')
        summary, table = _table(result.summary()), _table(result.to_frame())
        if summary != table:
            parts.append(summary)
        parts.append(f"<details><summary>numbers</summary>{table}</details>" if pictures else table)
    return "".join(parts)


def _table(frame: pd.DataFrame) -> str:
    return frame.to_html(index=False, border=0, float_format=lambda x: f"{x:.4g}")
