"""The page on models that were changed, beside the dense one: its words, and what draws them."""

from __future__ import annotations

from functools import partial

from lyapunov_prune.compression.report import REPORT as COMPRESSION
from lyapunov_prune.compression.report import CompressionReport
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.explaining.explanation import EXPLANATION, Explanation
from lyapunov_prune.healing.report import REPORT as HEALING
from lyapunov_prune.healing.report import Healing
from lyapunov_prune.joint.result import REPORT as JOINT
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.predictions.choice_comparison import ChoiceComparison
from lyapunov_prune.predictions.generation import GenerationDivergence
from lyapunov_prune.predictions.hierarchy_probe import HierarchyProbe
from lyapunov_prune.predictions.history import HistoryDivergence
from lyapunov_prune.predictions.verdict import Verdict
from lyapunov_prune.report.compression import compression_figure
from lyapunov_prune.report.evaluation import before_after_figure, speed_figure, tasks_figure
from lyapunov_prune.report.explaining import explanation_figure
from lyapunov_prune.report.healing import healing_figure
from lyapunov_prune.report.joint import importance_figure, joint_figure
from lyapunov_prune.report.predictions import (
    choices_figures,
    generation_figure,
    hierarchy_figure,
    history_figure,
    kl_figure,
    verdict_figure,
)
from lyapunov_prune.report.section import Section
from lyapunov_prune.shrinking.report import REPORT as SHRINKING
from lyapunov_prune.shrinking.report import Shrinking

# Files of which several sections draw a part.
_JOINT = partial(Section, JOINT, JointRun, in_folders=True)
_EVALUATION = partial(Section, "eval.json", Evaluation)

MODELS = (
    Section(
        SHRINKING,
        Shrinking,
        "What was done",
        "Every step in order, with its gain on text that it did not learn from. Steps without a gain are dropped. "
        "Lines in the figure are the quartiles of a speed, and the 95 % interval of the perplexity's ratio.",
        lambda r: {"before-after": before_after_figure(r)},
        leads=True,
    ),
    Section(
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
    Section(
        EXPLANATION,
        Explanation,
        "Where the error comes from",
        "The error that leaves a layer is what arrived, what the layer's own change added at the dense state, and what "
        "the compressed layer did to what arrived. Above, how the three move the error relative to the state; below, "
        "the KL that a layer costs when it alone is compressed, and the KL that is saved when it alone is put back.",
        lambda r: {"explanation": explanation_figure(r)},
        leads=True,
    ),
    Section(
        HEALING,
        Healing,
        "Healing",
        "The pruned model learns to predict what the dense one predicts, from one window a step, so the loss jumps "
        "with the text; the line is a running mean. A loss on the text learnt from shows progress, not success: "
        "the share recovered, of the perplexity that the removal cost, is measured on other text.",
        lambda r: {"healing": healing_figure(r)},
        in_folders=True,
        leads=True,
    ),
    _JOINT(
        "Joint removal",
        "A map of the score after recovery over the numbers of attentions and of activations removed: lines of equal P "
        "through measured points, the pairs of the budget, and the chosen one; below it the prediction interval of "
        "every pair. The score at the end is of data that neither training nor choice has seen. Seconds are of the "
        "run that ended, those of points of all runs that it went on from.",
        lambda r: {"joint": joint_figure(r.map, r.decision)},
        leads=True,
    ),
    _JOINT(
        "Pairs of the budget",
        "What the map says of the best pairs, with its prediction interval, and whether a pair lies within twice the "
        "noise of the chosen one: among those the points do not tell which is best.",
        part=lambda r: r.decision,
    ),
    _JOINT(
        "Recovered points",
        "Each point learnt from the dense model for a few steps, from the weights of the point before it on its chain, "
        "and was scored on the selection slice. The distillation loss is of the one item of its step.",
        part=lambda r: r.points,
    ),
    _JOINT(
        "Importance within each type",
        "By layer; the smallest of a type is removed first. The two types have separate axes because they are not "
        "compared: the map says how many of each to remove.",
        lambda r: {"importance": importance_figure(r)},
        part=lambda r: r.importance,
    ),
    Section(
        "verdict.json",
        Verdict,
        "Verdict by kind of task",
        "A choice is decided by the few options, generation by the whole distribution, "
        "again at each token. For each kind, on the items named below: how far the deciding quantity moved, how far it "
        "may move before the decision can change, and how many decisions are unchanged. If it moved further, a "
        "decision may still be unchanged. Other tasks of a kind may differ: measure your own.",
        lambda r: {"verdict": verdict_figure(r)},
    ),
    Section(
        "hierarchy.json",
        HierarchyProbe,
        "Hidden state, logits, probabilities",
        "One layer at a time replaced inside the dense model's own context, at each step that it decodes: how far the "
        "state, the logits and the probabilities turn, beside their second-order estimates, and the divergence of the "
        "prediction beside its proven bounds. A bound that holds speaks of these steps.",
        lambda r: {"hierarchy": hierarchy_figure(r), "kl": kl_figure(r)},
    ),
    Section(
        "generation.json",
        GenerationDivergence,
        "Generation",
        "Both models decode on their own from the same prompts. Once their texts differ they answer different "
        "questions, and similarity falls for that reason too.",
        lambda r: {"generation": generation_figure(r)},
    ),
    Section(
        "diverged-history.json",
        HistoryDivergence,
        "Direct error and diverged history",
        "The compressed model's predictions against the dense model's, where it reads the dense model's text and where "
        "it reads its own. The first is the compression's doing at each step; what the second adds comes back through "
        "the tokens that it generated, and is about another text once these differ. Broken lines are the estimates.",
        lambda r: {"history": history_figure(r)},
    ),
    Section(
        "choices.json",
        ChoiceComparison,
        "Multiple choice",
        "A choice is made among the few tokens that begin the options, which together may hold little of the "
        "probability: that is why it can survive a compression that changes what the model writes. The certificate "
        "speaks of the first token among those of the options, in these items.",
        choices_figures,
    ),
    _EVALUATION(
        "Evaluation",
        "Perplexity over non-overlapping windows, every window on its own.",
        lambda r: {"speed": speed_figure(r.speed)} if r.speed else {},
        leads=True,
    ),
    _EVALUATION(
        "Tasks",
        "Multiple choice asks which of a few given texts is likelier; generation has the model write, greedily. A "
        "model may keep the first and lose the second, so the share of answers that end in a cycle, and of 3-grams "
        "that are repeated, stand below the accuracies. Bars are 95 % intervals over items, each model on its own: "
        "Wilson's, of 3-grams 1.96 standard errors.",
        lambda r: {"tasks": tasks_figure(r)},
        part=lambda r: r.tasks,
        leads=True,
    ),
    _EVALUATION(
        "In llama.cpp",
        "The .gguf files as llama.cpp runs them: the same windows, and speed with the files in turns in one run.",
        part=lambda r: r.engine,
    ),
)
