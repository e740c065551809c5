"""The page on what layers do, and on which of them go: its words, and what draws them."""

from __future__ import annotations

from lyapunov_prune.bounds.report import BoundsReport
from lyapunov_prune.predictions.divergence import SkipDivergence, SublayerDivergence
from lyapunov_prune.profiles.influence import InfluenceProfile, SublayerInfluence
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.ranking.angular import AngularDistance
from lyapunov_prune.ranking.oracle import GreedyRemoval
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.report.bounds import bounds_figures
from lyapunov_prune.report.predictions import divergence_figure
from lyapunov_prune.report.profiles import contraction_figure, influence_figure, sublayer_figure
from lyapunov_prune.report.ranking import angular_figure, best_figure, oracle_figure
from lyapunov_prune.report.section import Section
from lyapunov_prune.report.sensitivity import sensitivity_figures
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

LAYERS = (
    Section(
        "profile.json",
        LayerProfile,
        "Contraction and Block Influence",
        "ρ is the factor by which a layer changes the relative energy of an error that reaches it: below one "
        "the layer absorbs it. Bars are 95 % bootstrap intervals over windows and seeds. Block Influence is "
        "how far a layer turns the hidden state. Both are measurements on the text named below, not bounds.",
        lambda r: {"contraction": contraction_figure(r.contraction), "influence": influence_figure(r.influence)},
        in_folders=True,
    ),
    Section(
        "influence.json",
        InfluenceProfile,
        "Block Influence",
        "How far a layer turns the hidden state: criterion bi removes the least first. Bars are standard errors over "
        "windows. A measurement on the text named below.",
        lambda r: {"influence-alone": influence_figure(r)},
    ),
    Section(
        "sublayers.json",
        SublayerInfluence,
        "Block Influence of attention and MLP",
        "How far each branch by itself turns the residual stream; the branch of least influence is removed first. "
        "Bars are standard errors over windows. A measurement on the text named below.",
        lambda r: {"sublayers": sublayer_figure(r)},
    ),
    Section(
        "angular.json",
        AngularDistance,
        "Runs of layers",
        "How far layers in a row turn the hidden state, all together: the run whose ends are nearest is removed as one "
        "by criterion angular. Of single layers it is Block Influence. A measurement on the text named below.",
        lambda r: {"angular": angular_figure(r)},
    ),
    Section(
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
    Section(
        "sublayer-divergence.json",
        SublayerDivergence,
        "Prediction without the attention or the MLP of a layer",
        "The same with one kind of branch alone, which adds nothing to the residual stream: how far the probabilities "
        "of the next token move, and the estimate by which criterion kl ranks. Layers without such a branch have none.",
        lambda r: {"sublayer-divergence": divergence_figure(r)},
    ),
    Section(
        "oracle.json",
        GreedyRemoval,
        "Greedy removal",
        "At each step every candidate was tried, and the one whose removal raises the perplexity least was removed; "
        "the number at a point is that layer. The perplexity is that of the text that chose the layers, so it is "
        "optimistic: measure on other text. A greedy order need not contain the best set of layers.",
        lambda r: {"oracle": oracle_figure(r)},
    ),
    Section(
        "best.json",
        BestRemoval,
        "The best of many choices",
        "Sets of layers that the cheap criteria propose, and swaps of single layers from the best of them, compared by "
        "their loss on the beginnings of windows that no score has seen; the best there were checked on all tokens. "
        "The windows that compared the sets also chose, so the loss is optimistic: measure on other text.",
        lambda r: {"best": best_figure(r)},
    ),
    Section(
        "sensitivity.json",
        Sensitivity,
        "Sensitivity",
        "One thing changed at a time, and the perplexity on text that no score has seen. Bars are 95 % intervals of "
        "the ratio to the dense model, paired by window. Drift is 1 − CKA of the states that the head reads. "
        "Measurements on one text; a rank correlation over the layers of one model is a hint, no law.",
        sensitivity_figures,
    ),
    Section(
        "bounds.json",
        BoundsReport,
        "Bounds",
        "Every matrix replaced by an approximation, and the error of every token divided by its proven bound. At "
        "one the bound is attained; above, it would be violated. A check covers only the inputs it saw.",
        bounds_figures,
    ),
)
